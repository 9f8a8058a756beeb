"""All that a layer does to its first product before attention, in one launch: query norm, latent and index write."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.latent_step.reference import IndexStep, check_latent_step, latent_step_reference


def latent_step(
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
    """rms_norm of product's first Q columns -> [T, Q]; `latent_write` of the next R + P, `index_write` of the last E.

    product [T, Q + R + P] or, with `index`, [T, Q + R + P + E], any row stride; q_norm_weight [Q]; the others as those
    functions want them. Columns behind these are left alone.
    """
    check_latent_step(product, q_norm_weight, norm_weight, table, positions, slots, latents, rank, index)
    if use_triton(latents):
        from benthic.kernels.latent_step.kernel import latent_step_triton  # triton is optional

        step = latent_step_triton
    else:
        step = latent_step_reference
    return step(product, q_norm_weight, norm_weight, eps, table, positions, slots, latents, rank=rank, index=index)


__all__ = ["IndexStep", "latent_step", "latent_step_reference"]
