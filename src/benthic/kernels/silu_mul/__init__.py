"""The activation of a gated feed-forward block."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.silu_mul.reference import silu_mul_reference


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """both [T, 2W], any row stride, gate's columns first -> silu(gate) * up [T, W], new.

    silu in float32, rounded to the dtype before the product, as torch's two functions do.
    """
    if both.dim() != 2 or both.shape[1] % 2:
        raise ValueError(f"silu_mul: {tuple(both.shape)} is not [tokens, gate and up]")
    if use_triton(both):
        from benthic.kernels.silu_mul.kernel import silu_mul_triton  # triton is optional

        return silu_mul_triton(both)
    return silu_mul_reference(both)


__all__ = ["silu_mul", "silu_mul_reference"]
