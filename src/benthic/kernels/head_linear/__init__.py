"""Each head's own product: what absorbs queries into latents, and what brings attended latents back to values."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.head_linear.reference import head_linear_reference

MOST_TOKENS = 64  # more are the library's affair


def head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """out[:, h] = x[:, h] @ weight[h] for every head h -> [T, H, N] in x's dtype, sums in float32.

    x [T, H, K], any strides of the first two dimensions; weight [H, K, N] of x's dtype; out contiguous. Without `out`
    the result is new, its first two dimensions in either order.
    """
    if (
        x.dim() != 3
        or weight.dim() != 3
        or x.shape[1:] != weight.shape[:2]
        or x.dtype != weight.dtype
        or (out is not None and (out.shape != (*x.shape[:2], weight.shape[2]) or not out.is_contiguous()))
    ):
        raise ValueError(
            f"head_linear: x {tuple(x.shape)} of {x.dtype}, weight {tuple(weight.shape)} of {weight.dtype} or out do "
            "not fit"
        )
    if use_triton(x) and len(x) <= MOST_TOKENS:
        from benthic.kernels.head_linear.kernel import fits, head_linear_triton  # triton is optional

        if fits(weight):
            return head_linear_triton(x, weight, out)
    return head_linear_reference(x, weight, out)


__all__ = ["MOST_TOKENS", "head_linear", "head_linear_reference"]
