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
    page_size = latents.shape[1]
    q = torch.cat([q_latent, q_rope], dim=-1).float()
    for row, length in enumerate(seq_lens.tolist()):
        if selected is None:
            positions = torch.arange(length, device=q.device)
        else:
            positions = selected[row][selected[row] >= 0].long()
        entries = read_latents(latents, page_table[row][positions // page_size], positions % page_size, rank)
        probs = (q[row] @ entries.T * scale).softmax(-1)
        out[row] = (probs @ entries[:, :rank]).to(out.dtype)
    return out
