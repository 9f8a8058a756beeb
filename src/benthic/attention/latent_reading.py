"""Cached latents and index keys in plain torch, and how a decode row's keys are scored. Letters as in `latent.py`."""

import torch

from benthic.attention.latent import LatentSpec
from benthic.kernels.latent_records import SCALE_BLOCK, latent_parts


def read_latents(pool: torch.Tensor, pages: torch.Tensor, num_keys: int, rank: int) -> torch.Tensor:
    """One layer's pool, pages int64 [n, M] -> float32 [n, num_keys, W], the first ones of these pages."""
    entries = pool.index_select(0, pages.flatten())
    return entry_floats(entries.view(len(pages), -1, entries.shape[-1])[:, :num_keys], rank)


def entry_floats(entries: torch.Tensor, rank: int) -> torch.Tensor:
    """Entries of the pool [..., bytes or W] -> float32 [..., W]."""
    if entries.dtype != torch.uint8:
        return entries.float()
    parts = latent_parts(entries, rank)
    assert parts.scales is not None
    scales = parts.scales.repeat_interleave(SCALE_BLOCK, -1)[..., :rank]
    return torch.cat((parts.latents.float() * scales, parts.rope.float()), -1)


def read_keys(pool: torch.Tensor, pages: torch.Tensor, num_keys: int, spec: LatentSpec) -> torch.Tensor:
    """One indexing layer's pool, pages int64 [n, M] -> index keys float64 [n, num_keys, E], the first ones."""
    index, size = spec.index, spec.page_size
    assert index is not None
    stored = pool.index_select(0, pages.flatten())
    stored = stored.view(*pages.shape, *stored.shape[1:])
    if stored.dtype != torch.uint8:
        return stored.flatten(1, 2)[:, :num_keys].double()
    codes = stored[..., : size * index.head_dim].view(torch.float8_e4m3fn).float()
    scales = stored[..., size * index.head_dim :].contiguous().view(torch.float32).double()
    keys = codes.view(*stored.shape[:2], size, index.head_dim) * scales.unsqueeze(-1)
    return keys.flatten(1, 2)[:, :num_keys]


def key_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [n, I, E], weights [n, I], keys [n, S, E], all float64 -> float32 [n, S]: see `LatentBackend.select`."""
    products = torch.bmm(queries, keys.transpose(1, 2)).relu_()
    return torch.bmm(weights.unsqueeze(1), products).squeeze(1).float()


def all_positions(lens: torch.Tensor, topk: int) -> torch.Tensor:
    """int32 [n, K]: 0 … len - 1, then -1, for lens of at most K."""
    positions = torch.arange(topk, dtype=torch.int32, device=lens.device)
    return torch.where(positions < lens.unsqueeze(1), positions, -1)
