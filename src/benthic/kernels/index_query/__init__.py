"""Turn the lightning indexer's queries and, for fp8 keys, quantise them."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.index_query.reference import index_query_reference


def index_query(
    queries: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    *,
    rope_dim: int,
    interleaved: bool,
    fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The FIRST P components turned by the token's position; with `fp8` e4m3 codes whose scales went into the weights.

    queries [T, I, E], any strides over tokens and heads; weights float32 [T, I]; table float32 [max_position, P];
    positions int64 [T]. Without `fp8`: `queries`, changed in place, and `weights`. With: new e4m3 [T, I, E] and
    weights times scale, new, contiguous; a scale per token and head, amax / 448. Maths in float32, rounded once.
    """
    if (
        table.shape[1] != rope_dim
        or rope_dim % 2
        or rope_dim > queries.shape[2]
        or weights.shape != queries.shape[:2]
        or positions.shape != queries.shape[:1]
    ):
        raise ValueError(
            f"index_query: queries {tuple(queries.shape)}, weights {tuple(weights.shape)}, table {tuple(table.shape)}, "
            f"positions {tuple(positions.shape)}, P {rope_dim} do not fit"
        )
    if use_triton(queries):
        from benthic.kernels.index_query.kernel import index_query_triton  # triton is optional

        turn = index_query_triton
    else:
        turn = index_query_reference
    return turn(queries, weights, table, positions, rope_dim=rope_dim, interleaved=interleaved, fp8=fp8)


__all__ = ["index_query", "index_query_reference"]
