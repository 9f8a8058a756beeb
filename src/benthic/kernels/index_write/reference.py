"""`index_write` in plain torch, and the shapes that it takes."""

import torch

from benthic.kernels.latent_math import quantise_e4m3, turn_rope

INDEX_EPS = 1e-6  # of the index keys' layer norm, whatever the model's own eps


def check_index_write(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    page_size: int,
) -> None:
    """Raise ValueError where the shapes don't fit."""
    size = projected.shape[1]
    page = (page_size * (size + 4),) if keys.dtype == torch.uint8 else (page_size, size)
    if (
        not weight.shape == bias.shape == (size,)
        or table.shape[1] > size
        or keys.shape[1:] != page
        or not positions.shape == slots.shape == projected.shape[:1]
    ):
        raise ValueError(
            f"index_write: projected {tuple(projected.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}, "
            f"positions {tuple(positions.shape)}, slots {tuple(slots.shape)}, {keys.dtype} pool {tuple(keys.shape)}, "
            f"pages of {page_size}, P {table.shape[1]} do not fit"
        )


def index_views(keys: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's codes [pages + 1, page_size * E] and scales [pages + 1, page_size]; unquantised, the keys twice."""
    if keys.dtype != torch.uint8:
        return keys, keys
    head = keys.shape[1] - 4 * page_size
    return keys[:, :head].view(torch.float8_e4m3fn), keys[:, head:].view(torch.float32)


def index_write_reference(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    *,
    page_size: int,
    interleaved: bool,
) -> None:
    """See `benthic.kernels.index_write.index_write`."""
    size, rope_dim = projected.shape[1], table.shape[1]
    page, offset = slots // page_size, slots % page_size
    normed = torch.nn.functional.layer_norm(projected.float(), (size,), weight.float(), bias.float(), INDEX_EPS)
    turned = turn_rope(normed[:, :rope_dim], table, positions, interleaved)
    key = torch.cat([turned, normed[:, rope_dim:]], -1)
    if keys.dtype != torch.uint8:
        keys[page, offset] = key.to(keys.dtype)
        return
    codes, scales = index_views(keys, page_size)
    values, scale = quantise_e4m3(key)
    codes.view(torch.uint8).view(-1, page_size, size)[page, offset] = values.view(torch.uint8)
    scales[page, offset] = scale
