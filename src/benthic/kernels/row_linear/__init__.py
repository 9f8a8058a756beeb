"""A product of one row with a wide weight: bound by the weight's way from memory."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.row_linear.reference import row_linear_reference


def row_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T -> [1, N] in x's dtype, sums in float32, in an order that depends on the shapes only.

    x [1, D]; weight [N, D] of x's dtype, any row stride.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape != (1, weight.shape[1]) or x.dtype != weight.dtype:
        raise ValueError(
            f"row_linear: x {tuple(x.shape)} of {x.dtype} and weight {tuple(weight.shape)} of {weight.dtype} do not fit"
        )
    if use_triton(x):
        from benthic.kernels.row_linear.kernel import row_linear_triton  # triton is optional

        return row_linear_triton(x, weight)
    return row_linear_reference(x, weight)


__all__ = ["row_linear", "row_linear_reference"]
