"""Root-mean-square norm, with the residual addition before it fused in."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.rms_norm.reference import rms_norm_reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; with `residual`, of x + residual, which it then holds.

    x [..., D] (fp32, bf16 or fp16); weight [D]; residual like x, contiguous, changed in place. The mean is taken in
    float32, the normalised value rounded to x's dtype before the weight, as Llama does (arXiv:1910.07467).
    """
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)} or the residual do not fit")
    if use_triton(x):
        from benthic.kernels.rms_norm.kernel import rms_norm_triton  # triton is optional

        return rms_norm_triton(x, weight, eps, residual)
    return rms_norm_reference(x, weight, eps, residual)


__all__ = ["rms_norm", "rms_norm_reference"]
