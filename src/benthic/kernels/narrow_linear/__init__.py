"""A product with few outputs in float32: router logits, the indexer's head weights."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.narrow_linear.reference import narrow_linear_reference

MAX_OUTPUTS = 256


def narrow_linear(x: torch.Tensor, weight: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """x @ weight.T * factor -> float32 [T, N], products and sums in float32 whatever the inputs' dtype.

    x [T, D], any row stride; weight [N, D], N at most 256. The sum's order depends on the shapes only.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or weight.shape[0] > MAX_OUTPUTS:
        raise ValueError(
            f"narrow_linear: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit, or more than "
            f"{MAX_OUTPUTS} outputs"
        )
    if use_triton(x):
        from benthic.kernels.narrow_linear.kernel import narrow_linear_triton  # triton is optional

        return narrow_linear_triton(x, weight, factor)
    return narrow_linear_reference(x, weight, factor)


__all__ = ["MAX_OUTPUTS", "narrow_linear", "narrow_linear_reference"]
