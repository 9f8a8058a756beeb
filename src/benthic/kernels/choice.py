"""Whether an operation on a tensor runs as its Triton kernel or as its plain torch reference."""

import functools
import importlib.util

import torch


@functools.cache
def has_triton() -> bool:
    """Whether the triton package is installed; the plain CPU install has none."""
    return importlib.util.find_spec("triton") is not None


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lies where a Triton kernel can run."""
    return tensor.is_cuda and has_triton()
