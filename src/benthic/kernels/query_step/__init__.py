"""Turn attention's and the indexer's queries, both columns of one product, and absorb the first, in one launch."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.query_step.reference import Turned, check_query_step, query_step_reference


def query_step(
    product: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    interleaved: bool,
    fp8: bool,
    keys: torch.Tensor | None = None,
) -> Turned:
    """`query_rope` of product's first H * (N + P) columns, in place, and `index_query` of the I * E behind them.

    product [T, H * (N + P) + I * E], any row stride; weights float32 [T, I]; `head_dim` is N + P. Returns what
    `index_query` does, the queries [T, I, E] (without `fp8` a view of product) and the weights, and with `keys`
    [H, N, R] `head_linear` of each head's first N columns.
    """
    check_query_step(product, weights, table, positions, num_heads, head_dim, rope_dim, keys)
    if use_triton(product):
        from benthic.kernels.query_step.kernel import query_step_triton  # triton is optional

        step = query_step_triton
    else:
        step = query_step_reference
    return step(
        product, weights, table, positions,
        num_heads=num_heads, head_dim=head_dim, rope_dim=rope_dim, interleaved=interleaved, fp8=fp8, keys=keys,
    )  # fmt: skip


__all__ = ["Turned", "query_step", "query_step_reference"]
