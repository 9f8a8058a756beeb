"""`rms_norm` in plain torch."""

import torch


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `benthic.kernels.rms_norm.rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
