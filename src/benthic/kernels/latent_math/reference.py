"""Turning and quantising in plain torch."""

import torch

E4M3_MAX = 448.0  # largest finite float8_e4m3fn
SCALE_FLOOR = 1e-12  # amax is taken as at least this, so that a row of zeros has a scale


def turn_rope(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, ..., P] turned by its token's position -> float32, order of the components kept.

    table float32 [max_position, P]: P/2 cosines, then P/2 sines. Pairs (2i, 2i + 1) turn together if `interleaved`,
    else (i, i + P/2).
    """
    half = table.shape[1] // 2
    rows = table[positions].view(len(positions), *(1,) * (x.dim() - 2), 2 * half)
    cos, sin = rows[..., :half], rows[..., half:]
    wide = x.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def quantise_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n] -> e4m3 codes [..., n] and float32 scales [...]: x is about code * scale, scale = amax / 448."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp_min(SCALE_FLOOR) / E4M3_MAX
    codes = (wide / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn), scale
