"""Rotary position embedding of q and k in place, half-split as Llama stores it (arXiv:2104.09864)."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.rope.reference import rope_reference


def rope(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of every head by its token's position.

    q [T, H, head_dim], k [T, G, head_dim], any strides over tokens and heads, changed in place; cos_sin float32
    [max_position, R]: R/2 cosines, then R/2 sines; positions int64 [T], below max_position.
    """
    rotary = cos_sin.shape[1]
    if (
        rotary % 2
        or rotary > q.shape[2]
        or q.shape[2] != k.shape[2]
        or not (positions.shape == q.shape[:1] == k.shape[:1])
    ):
        raise ValueError(
            f"rope: q {tuple(q.shape)}, k {tuple(k.shape)}, positions {tuple(positions.shape)}, R {rotary} do not fit"
        )
    if use_triton(q):
        from benthic.kernels.rope.kernel import rope_triton  # triton is optional

        rope_triton(q, k, cos_sin, positions)
    else:
        rope_reference(q, k, cos_sin, positions)


__all__ = ["rope", "rope_reference"]
