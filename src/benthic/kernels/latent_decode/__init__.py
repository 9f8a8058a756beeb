"""Attention of one new token a row over its paged latents: all of them, or selected ones (split over the keys)."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.latent_decode.reference import latent_decode_reference
from benthic.kernels.latent_records import check_latent_shapes, check_selected


def latent_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    selected: torch.Tensor | None,
    max_seq_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    rank: int,
) -> torch.Tensor:
    """softmax(scale * (q_latent . latent + q_rope . rope)) . latent over the first seq_lens[d] tokens of row d.

    q_latent [D, H, R], q_rope [D, H, P]; latents: one layer's pool, see `latent_records`; page_table int32 [D, M];
    seq_lens int32 [D], at least 1, at most max_seq_len (which only shapes the launch). `selected` int32 [D, K] gives
    each row's logical positions instead (-1 entries are ignored, at least one is none); None: all.
    Returns out [D, H, R]. Capture-safe. Raises ValueError where shapes don't fit.
    """
    out = torch.empty_like(q_latent) if out is None else out
    check_latent_shapes(q_latent, q_rope, latents, out, rank)
    check_selected(selected, q_latent.shape[0])
    if page_table.dim() != 2 or not page_table.shape[0] == seq_lens.shape[0] == q_latent.shape[0]:
        raise ValueError(
            f"page_table {tuple(page_table.shape)} and seq_lens {tuple(seq_lens.shape)} "
            f"do not have the {q_latent.shape[0]} rows of the queries"
        )
    args = (q_latent, q_rope, latents, page_table, seq_lens, selected, max_seq_len, scale, out)
    if use_triton(q_latent):
        from benthic.kernels.latent_decode.kernel import latent_decode_triton  # triton is optional

        return latent_decode_triton(*args, rank=rank)
    return latent_decode_reference(*args, rank=rank)


__all__ = ["latent_decode", "latent_decode_reference"]
