"""Norm, turn and write new tokens' latents into one layer of the pool."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.latent_write.reference import check_latent_write, latent_write_reference


def latent_write(
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    *,
    rank: int,
) -> None:
    """latents[slot] = rms_norm(projected[:, :R]) * norm_weight, then projected[:, R:] turned (interleaved).

    projected [T, R + P], any row stride; norm_weight [R]; table float32 [max_position, P]; positions, slots int64 [T].
    latents [pages + 1, page_size, R + P] in the model's dtype, or uint8 [pages + 1, page_size, R + 4 * ceil(R / 128) +
    2 * P]: e4m3 codes, float32 scales, bfloat16 rope part (attention/latent.py); changed in place. The norm is
    `rms_norm`'s: float32, rounded to projected's dtype, then scaled.
    """
    check_latent_write(projected, norm_weight, table, positions, slots, latents, rank)
    if use_triton(latents):
        from benthic.kernels.latent_write.kernel import latent_write_triton  # triton is optional

        latent_write_triton(projected, norm_weight, eps, table, positions, slots, latents, rank=rank)
    else:
        latent_write_reference(projected, norm_weight, eps, table, positions, slots, latents, rank=rank)


__all__ = ["check_latent_write", "latent_write", "latent_write_reference"]
