"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467): fused kernels on a GPU, plain torch elsewhere."""

import torch

from benthic.kernels.experts import ExpertParts, sum_norm
from benthic.kernels.norm_products import NormProducts, norm_products
from benthic.kernels.rms_norm import rms_norm


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension: float32 up to the division, rounded, then scaled."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], same dtype."""
        return rms_norm(x, self._weight, self._eps) if x.is_cuda else self._plain(x)

    def after_add(self, x: torch.Tensor | ExpertParts, residual: torch.Tensor) -> torch.Tensor:
        """The norm of residual + x [T, size]; `residual` holds that sum afterwards."""
        if isinstance(x, ExpertParts):
            return sum_norm(x, self._weight, self._eps, residual)
        if x.is_cuda:
            return rms_norm(x, self._weight, self._eps, residual)
        return self._plain(residual.add_(x))

    def with_products(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        narrow: torch.Tensor | None,
        factor: float,
    ) -> NormProducts:
        """`norm_products` with this norm; `residual` stays as it is."""
        return norm_products(x, residual, self._weight, self._eps, weight, narrow, factor)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self._weight)
