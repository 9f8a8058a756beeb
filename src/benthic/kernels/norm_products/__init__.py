"""The residual addition, the norm and the first products of a block, for few rows, in one launch."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.norm_products.reference import NormProducts, norm_products_reference

MOST_TOKENS = 32  # of 64 the launches apart are as quick


def norm_products(
    added: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None,
    narrow: torch.Tensor | None,
    factor: float = 1.0,
) -> NormProducts:
    """`rms_norm` of added + residual, its product with `weight`, and `narrow_linear`'s with `narrow` and `factor`.

    added and residual [T, D] of one dtype, contiguous, both left as they are; norm_weight [D]; weight [N, D] and narrow
    [M, D] of that dtype, any row stride, one of them None or neither. T is at most MOST_TOKENS, and 1 with `weight`.
    Sums are in float32, in an order that depends on the shapes only.
    """
    matrices = [matrix for matrix in (weight, narrow) if matrix is not None]
    if (
        added.dim() != 2
        or len(added) > (MOST_TOKENS if weight is None else 1)
        or added.shape[1:] != norm_weight.shape
        or residual.shape != added.shape
        or not matrices
        or any(m.shape[1:] != norm_weight.shape or m.dtype != added.dtype for m in matrices)
    ):
        shapes = [tuple(matrix.shape) for matrix in matrices]
        raise ValueError(
            f"norm_products: added {tuple(added.shape)}, residual {tuple(residual.shape)}, norm "
            f"{tuple(norm_weight.shape)} and weights {shapes} do not fit"
        )
    if use_triton(added):
        from benthic.kernels.norm_products.kernel import norm_products_triton  # triton is optional

        return norm_products_triton(added, residual, norm_weight, eps, weight, narrow, factor)
    return norm_products_reference(added, residual, norm_weight, eps, weight, narrow, factor)


__all__ = ["MOST_TOKENS", "NormProducts", "norm_products", "norm_products_reference"]
