"""`query_step` composed of the single functions' references."""

from typing import NamedTuple

import torch

from benthic.kernels.head_linear import head_linear
from benthic.kernels.index_query import index_query_reference
from benthic.kernels.query_rope import query_rope_reference


class Turned(NamedTuple):
    """Queries as attention and its indexer want them."""

    queries: torch.Tensor  # [T, I, E] the indexer's
    weights: torch.Tensor  # float32 [T, I]
    latent: torch.Tensor | None  # [T, H, R] attention's, absorbed; None without keys


def check_query_step(
    product: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    keys: torch.Tensor | None = None,
) -> None:
    """Raise ValueError where the shapes don't fit."""
    tokens, width = product.shape
    rest = width - num_heads * head_dim
    size = rest // max(1, weights.shape[1])
    if (
        rest != size * weights.shape[1]
        or not 0 < rope_dim <= min(size, head_dim)
        or table.shape[1] != rope_dim
        or rope_dim % 2
        or weights.shape[0] != tokens
        or positions.shape != (tokens,)
        or (keys is not None and (len(keys) != num_heads or keys.shape[1] > head_dim - rope_dim))
    ):
        raise ValueError(
            f"query_step: product {tuple(product.shape)}, weights {tuple(weights.shape)}, table {tuple(table.shape)}, "
            f"positions {tuple(positions.shape)}, {num_heads} heads of {head_dim}, P {rope_dim} or keys "
            f"{None if keys is None else tuple(keys.shape)} do not fit"
        )


def split(
    product: torch.Tensor, num_heads: int, head_dim: int, num_index_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views: attention's queries [T, H, N + P] and the indexer's [T, I, E]."""
    tokens, width = product.shape[0], num_heads * head_dim
    size = (product.shape[1] - width) // num_index_heads
    index = product[:, width:].view(tokens, num_index_heads, size)
    return product[:, :width].view(tokens, num_heads, head_dim), index


def query_step_reference(
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
    """See `benthic.kernels.query_step.query_step`."""
    q, queries = split(product, num_heads, head_dim, weights.shape[1])
    query_rope_reference(q, table, positions, rope_dim=rope_dim)
    turned = index_query_reference(
        queries, weights, table, positions, rope_dim=rope_dim, interleaved=interleaved, fp8=fp8
    )
    return Turned(*turned, None if keys is None else head_linear(q[..., : keys.shape[1]], keys))
