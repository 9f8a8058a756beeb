"""`index_query` in plain torch."""

import torch

from benthic.kernels.latent_math import quantise_e4m3, turn_rope


def index_query_reference(
    queries: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    *,
    rope_dim: int,
    interleaved: bool,
    fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `benthic.kernels.index_query.index_query`."""
    turned = turn_rope(queries[..., :rope_dim], table, positions, interleaved)
    if not fp8:
        queries[..., :rope_dim] = turned.to(queries.dtype)
        return queries, weights
    codes, scales = quantise_e4m3(torch.cat([turned, queries[..., rope_dim:].float()], -1))
    return codes, weights * scales
