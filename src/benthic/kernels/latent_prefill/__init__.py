"""Attention of one row's prefill chunk over its paged latents: all of them up to each query, or selected ones."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.latent_prefill.reference import latent_prefill_reference
from benthic.kernels.latent_records import check_latent_shapes, check_selected


def latent_prefill(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_row: torch.Tensor,
    first_position: int,
    selected: torch.Tensor | None,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    rank: int,
) -> torch.Tensor:
    """softmax(scale * (q_latent . latent + q_rope . rope)) . latent for n consecutive queries of one sequence.

    q_latent [n, H, R], q_rope [n, H, P]; latents: one layer's pool, see `latent_records`; page_row int32 [M], the
    sequence's pages; query t stands at first_position + t. `selected` int32 [n, K] gives each query's logical positions
    (-1 entries are ignored, at least one is none; fastest where they are last); None: all up to its own.
    Returns out [n, H, R]. Raises ValueError where shapes don't fit.
    """
    out = torch.empty_like(q_latent) if out is None else out
    check_latent_shapes(q_latent, q_rope, latents, out, rank)
    check_selected(selected, q_latent.shape[0])
    if page_row.dim() != 1:
        raise ValueError(f"page_row {tuple(page_row.shape)} is not one row of a page table")
    if use_triton(q_latent):
        from benthic.kernels.latent_prefill.kernel import latent_prefill_triton  # triton is optional

        return latent_prefill_triton(
            q_latent, q_rope, latents, page_row, first_position, selected, scale, out, rank=rank
        )
    return latent_prefill_reference(
        q_latent, q_rope, latents, page_row, first_position, selected, scale, out, rank=rank
    )


__all__ = ["latent_prefill", "latent_prefill_reference"]
