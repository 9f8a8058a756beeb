"""`norm_products` by the references of its parts."""

from typing import NamedTuple

import torch

from benthic.kernels.narrow_linear.reference import narrow_linear_reference
from benthic.kernels.rms_norm.reference import rms_norm_reference
from benthic.kernels.row_linear.reference import row_linear_reference


class NormProducts(NamedTuple):
    """What becomes of the rows."""

    residual: torch.Tensor  # [T, D] the sum
    normed: torch.Tensor  # [T, D]
    product: torch.Tensor | None  # [T, N] in their dtype
    narrow: torch.Tensor | None  # float32 [T, M]


def norm_products_reference(
    added: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None,
    narrow: torch.Tensor | None,
    factor: float = 1.0,
) -> NormProducts:
    """See `benthic.kernels.norm_products.norm_products`."""
    total = residual.clone()
    normed = rms_norm_reference(added, norm_weight, eps, total)
    return NormProducts(
        total,
        normed,
        None if weight is None else row_linear_reference(normed, weight),
        None if narrow is None else narrow_linear_reference(normed, narrow, factor),
    )
