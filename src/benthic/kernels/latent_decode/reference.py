"""`latent_decode` in plain torch."""

import torch

from benthic.kernels.latent_records import read_latents


def latent_decode_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    selected: torch.Tensor | None,
    max_seq_len: int,
    scale: float,
    out: torch.Tensor,
    *,
    rank: int,
) -> torch.Tensor:
    """See `benthic.kernels.latent_decode.latent_decode`. Row by row; reads lengths and selections on the host."""
    q = torch.cat([q_latent, q_rope], dim=-1).float()
    for row, length in enumerate(seq_lens.tolist()):
        entries = _entries(latents, page_table[row], length, None if selected is None else selected[row], rank)
        probs = (q[row] @ entries.T * scale).softmax(-1)
        out[row] = (probs @ entries[:, :rank]).to(out.dtype)
    return out


def latent_decode_part_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    selected: torch.Tensor | None,
    scale: float,
    *,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `benthic.kernels.latent_decode.latent_decode_part`. Row by row, as above."""
    q = torch.cat([q_latent, q_rope], dim=-1).float()
    out = torch.zeros(q_latent.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q_latent.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        entries = _entries(latents, page_table[row], length, None if selected is None else selected[row], rank)
        if len(entries):
            logits = q[row] @ entries.T * scale
            out[row] = logits.softmax(-1) @ entries[:, :rank]
            lse[row] = logits.logsumexp(-1)
    return out, lse


def _entries(
    latents: torch.Tensor, pages: torch.Tensor, length: int, selected: torch.Tensor | None, rank: int
) -> torch.Tensor:
    """What one row attends to, float32 [n, R + P]."""
    page_size = latents.shape[1]
    positions = torch.arange(length, device=pages.device) if selected is None else selected[selected >= 0].long()
    return read_latents(latents, pages[positions // page_size], positions % page_size, rank)
