"""Turn the rope part of latent attention's queries in place."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.query_rope.reference import query_rope_reference


def query_rope(q: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, *, rope_dim: int) -> None:
    """Turn the LAST P components of every head by its token's position, interleaved: pairs (2i, 2i + 1).

    q [T, H, N + P], any strides over tokens and heads, changed in place; table float32 [max_position, P]: P/2 cosines,
    then P/2 sines; positions int64 [T].
    """
    if table.shape[1] != rope_dim or rope_dim % 2 or rope_dim > q.shape[2] or positions.shape != q.shape[:1]:
        raise ValueError(
            f"query_rope: q {tuple(q.shape)}, table {tuple(table.shape)}, positions {tuple(positions.shape)}, "
            f"P {rope_dim} do not fit"
        )
    if use_triton(q):
        from benthic.kernels.query_rope.kernel import query_rope_triton  # triton is optional

        query_rope_triton(q, table, positions, rope_dim=rope_dim)
    else:
        query_rope_reference(q, table, positions, rope_dim=rope_dim)


__all__ = ["query_rope", "query_rope_reference"]
