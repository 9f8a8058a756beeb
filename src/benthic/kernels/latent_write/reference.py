"""`latent_write` in plain torch, and the shapes that it takes."""

import torch

from benthic.kernels.latent_math import quantise_e4m3, turn_rope
from benthic.kernels.latent_records import SCALE_BLOCK
from benthic.kernels.rms_norm import rms_norm_reference


def check_latent_write(
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    rank: int,
) -> None:
    """Raise ValueError where the shapes don't fit."""
    rope_dim = table.shape[1]
    record = rank + rope_dim
    if latents.dtype == torch.uint8:
        record = rank + 4 * (-(-rank // SCALE_BLOCK)) + 2 * rope_dim
    if (
        projected.shape[1] != rank + rope_dim
        or norm_weight.shape != (rank,)
        or latents.shape[-1] != record
        or not positions.shape == slots.shape == projected.shape[:1]
    ):
        raise ValueError(
            f"latent_write: projected {tuple(projected.shape)}, norm weight {tuple(norm_weight.shape)}, positions "
            f"{tuple(positions.shape)}, slots {tuple(slots.shape)}, {latents.dtype} pool {tuple(latents.shape)}, "
            f"R {rank}, P {rope_dim} do not fit"
        )


def latent_write_reference(
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
    """See `benthic.kernels.latent_write.latent_write`."""
    if len(slots) == 0:
        return
    page, offset = slots // latents.shape[1], slots % latents.shape[1]
    latent = rms_norm_reference(projected[:, :rank], norm_weight, eps)
    rope = turn_rope(projected[:, rank:], table, positions, interleaved=True)
    if latents.dtype != torch.uint8:
        latents[page, offset] = torch.cat([latent.to(latents.dtype), rope.to(latents.dtype)], -1)
        return
    tokens, blocks = len(slots), -(-rank // SCALE_BLOCK)
    padded = torch.nn.functional.pad(latent.float(), (0, blocks * SCALE_BLOCK - rank))
    codes, scales = quantise_e4m3(padded.view(tokens, blocks, SCALE_BLOCK))
    parts = (codes.flatten(1)[:, :rank], scales, rope.to(torch.bfloat16))
    latents[page, offset] = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
