"""`latent_unpack` in plain torch."""

import torch

from benthic.kernels.latent_records import read_latents


def latent_unpack_reference(
    latents: torch.Tensor, page_row: torch.Tensor, num_keys: int, out: torch.Tensor, *, rank: int
) -> torch.Tensor:
    """See `benthic.kernels.latent_unpack.latent_unpack`; writes `out` and returns it."""
    page_size = latents.shape[1]
    positions = torch.arange(num_keys, device=latents.device)
    entries = read_latents(latents, page_row[positions // page_size], positions % page_size, rank)
    out.view(-1, out.shape[-1])[:num_keys] = entries.to(out.dtype)
    return out
