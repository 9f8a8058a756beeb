"""Attention of one new token a row over its paged latents: all of them, or selected ones (split over the keys)."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.latent_decode.reference import latent_decode_part_reference, latent_decode_reference
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
    _check(q_latent, q_rope, latents, page_table, seq_lens, selected, out, rank)
    args = (q_latent, q_rope, latents, page_table, seq_lens, selected, max_seq_len, scale, out)
    if use_triton(q_latent):
        from benthic.kernels.latent_decode.kernel import latent_decode_triton  # triton is optional

        return latent_decode_triton(*args, rank=rank)
    return latent_decode_reference(*args, rank=rank)


def latent_decode_part(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    selected: torch.Tensor | None,
    max_seq_len: int,
    scale: float,
    *,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`latent_decode` over some of each row's keys, to be merged with the results over its others.

    The tokens that stand here alone are counted in seq_lens and have pages in page_table; `selected` has the places
    among them, valid ones first, -1 behind. A row may have no token, and no selected one. Returns out float32 [D, H, R]
    and the logits' log-sum-exp, float32 [D, H], base e: 0 and -inf without a key. Capture-safe.
    """
    out = torch.empty(q_latent.shape, dtype=torch.float32, device=q_latent.device)
    _check(q_latent, q_rope, latents, page_table, seq_lens, selected, out, rank)
    args = (q_latent, q_rope, latents, page_table, seq_lens, selected)
    if use_triton(q_latent):
        from benthic.kernels.latent_decode.kernel import latent_decode_triton  # triton is optional

        lse = torch.empty(q_latent.shape[:2], dtype=torch.float32, device=q_latent.device)
        latent_decode_triton(*args, max_seq_len, scale, out, rank=rank, out_lse=lse)
        return out, lse
    return latent_decode_part_reference(*args, scale, rank=rank)


def _check(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    selected: torch.Tensor | None,
    out: torch.Tensor,
    rank: int,
) -> None:
    check_latent_shapes(q_latent, q_rope, latents, out, rank)
    check_selected(selected, q_latent.shape[0])
    if page_table.dim() != 2 or not page_table.shape[0] == seq_lens.shape[0] == q_latent.shape[0]:
        raise ValueError(
            f"page_table {tuple(page_table.shape)} and seq_lens {tuple(seq_lens.shape)} "
            f"do not have the {q_latent.shape[0]} rows of the queries"
        )


__all__ = ["latent_decode", "latent_decode_part", "latent_decode_part_reference", "latent_decode_reference"]
