"""`latent_prefill` in plain torch."""

import torch

from benthic.kernels.latent_records import read_latents


def latent_prefill_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_row: torch.Tensor,
    first_position: int,
    selected: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    rank: int,
) -> torch.Tensor:
    """See `benthic.kernels.latent_prefill.latent_prefill`. Query by query; reads the selections on the host."""
    page_size = latents.shape[1]
    q = torch.cat([q_latent, q_rope], dim=-1).float()
    for token in range(q.shape[0]):
        if selected is None:
            positions = torch.arange(first_position + token + 1, device=q.device)
        else:
            positions = selected[token][selected[token] >= 0].long()
        entries = read_latents(latents, page_row[positions // page_size], positions % page_size, rank)
        probs = (q[token] @ entries.T * scale).softmax(-1)
        out[token] = (probs @ entries[:, :rank]).to(out.dtype)
    return out
