"""`latent_step` composed of the single functions' references."""

from dataclasses import dataclass

import torch

from benthic.kernels.index_write import check_index_write, index_write_reference
from benthic.kernels.latent_write import check_latent_write, latent_write_reference
from benthic.kernels.rms_norm import rms_norm_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStep:
    """What an indexing layer's keys want: the layer norm [E] each, one layer of the pool, and how pairs turn."""

    weight: torch.Tensor
    bias: torch.Tensor
    keys: torch.Tensor
    page_size: int
    interleaved: bool


def check_latent_step(
    product: torch.Tensor,
    q_norm_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    rank: int,
    index: IndexStep | None,
) -> None:
    """Raise ValueError where the shapes don't fit."""
    _, latent, key = parts(product, q_norm_weight, rank + table.shape[1], index)
    check_latent_write(latent, norm_weight, table, positions, slots, latents, rank)
    if index is not None:
        check_index_write(key, index.weight, index.bias, table, positions, slots, index.keys, index.page_size)


def parts(
    product: torch.Tensor, q_norm_weight: torch.Tensor, width: int, index: IndexStep | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The columns of the query latent [T, Q], of the latent [T, R + P] and of the index key [T, E or 0]."""
    middle = q_norm_weight.shape[0]
    last = middle + width
    end = last + (0 if index is None else index.weight.shape[0])
    if product.shape[1] < end:
        raise ValueError(f"latent_step: product {tuple(product.shape)} has fewer than {end} columns")
    return product[:, :middle], product[:, middle:last], product[:, last:end]


def latent_step_reference(
    product: torch.Tensor,
    q_norm_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    *,
    rank: int,
    index: IndexStep | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.latent_step.latent_step`."""
    query, latent, key = parts(product, q_norm_weight, rank + table.shape[1], index)
    latent_write_reference(latent, norm_weight, eps, table, positions, slots, latents, rank=rank)
    if index is not None:
        index_write_reference(
            key, index.weight, index.bias, table, positions, slots, index.keys,
            page_size=index.page_size, interleaved=index.interleaved,
        )  # fmt: skip
    return rms_norm_reference(query, q_norm_weight, eps)
