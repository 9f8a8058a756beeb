"""One layer's pool of latents as kernels take it: its two forms, their checks, and reading them in plain torch.

model dtype [pages + 1, page_size, R + P]                            the latent, then the turned rope part
uint8       [pages + 1, page_size, R + 4 * ceil(R / 128) + 2 * P]    fp8: R codes in e4m3, a float32 scale for each
                                                                     128 of them (value = code * scale), P bfloat16
"""

from dataclasses import dataclass

import torch

SCALE_BLOCK = 128  # latents that share an fp8 scale


@dataclass(frozen=True, slots=True)
class LatentParts:
    """Views of one pool, each [pages + 1, page_size, ...]: `latents` R elements, `rope` P, `scales` only where fp8."""

    latents: torch.Tensor  # model dtype or float8_e4m3fn
    rope: torch.Tensor  # model dtype or bfloat16
    scales: torch.Tensor | None  # float32


def latent_parts(latents: torch.Tensor, rank: int) -> LatentParts:
    """The parts of a pool, without a copy."""
    if latents.dtype != torch.uint8:
        return LatentParts(latents[..., :rank], latents[..., rank:], None)
    rope = rank + 4 * -(-rank // SCALE_BLOCK)
    return LatentParts(
        latents[..., :rank].view(torch.float8_e4m3fn),
        latents[..., rope:].view(torch.bfloat16),
        latents[..., rank:rope].view(torch.float32),
    )


def read_latents(latents: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, rank: int) -> torch.Tensor:
    """The entries at [pages, offsets] (integer tensors of one shape) as float32 [..., R + P], scales applied."""
    entries = latents[pages.long(), offsets.long()]
    parts = latent_parts(entries, rank)
    values = parts.latents.float()
    if parts.scales is not None:
        values = values * parts.scales.repeat_interleave(SCALE_BLOCK, dim=-1)[..., :rank]
    return torch.cat([values, parts.rope.float()], dim=-1)


def check_latent_shapes(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latents: torch.Tensor, out: torch.Tensor, rank: int
) -> None:
    """Raise ValueError where queries, pool and output don't fit together, or the pool has neither form."""
    if q_latent.dim() != 3 or q_rope.dim() != 3 or q_latent.shape[:2] != q_rope.shape[:2] or q_latent.shape[2] != rank:
        raise ValueError(
            f"q_latent {tuple(q_latent.shape)} and q_rope {tuple(q_rope.shape)} are not [T, H, {rank}] and [T, H, P]"
        )
    if out.shape != q_latent.shape:
        raise ValueError(f"out {tuple(out.shape)} is not shaped as q_latent {tuple(q_latent.shape)}")
    rope_dim = q_rope.shape[2]
    fp8 = latents.dtype == torch.uint8
    wanted = rank + 4 * -(-rank // SCALE_BLOCK) + 2 * rope_dim if fp8 else rank + rope_dim
    if latents.dim() != 3 or latents.shape[2] != wanted:
        raise ValueError(
            f"latents {tuple(latents.shape)} of {latents.dtype} are not [pages, page_size, {wanted}], "
            f"as rank {rank} and {rope_dim} rope components want"
        )
    if not fp8 and latents.dtype != q_latent.dtype:
        raise ValueError(f"latents are {latents.dtype}, queries {q_latent.dtype}: they must agree, or latents be uint8")
    if fp8 and rank % 4:
        raise ValueError(f"rank {rank} is not a multiple of 4, which the scales of fp8 latents need to be aligned")
    if latents.shape[1] & (latents.shape[1] - 1):
        raise ValueError(f"page size {latents.shape[1]} is not a power of two")


def check_selected(selected: torch.Tensor | None, rows: int) -> None:
    """Raise ValueError unless `selected` is None or int32 [rows, K] with K >= 1."""
    if selected is None:
        return
    if selected.dim() != 2 or selected.shape[0] != rows or selected.shape[1] < 1 or selected.dtype != torch.int32:
        raise ValueError(f"selected {tuple(selected.shape)} of {selected.dtype} is not int32 [{rows}, K >= 1]")
