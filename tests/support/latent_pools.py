"""Rope tables, and cached latents and index keys read back in float64 as attention/latent.py describes them."""

import torch

SCALE_BLOCK = 128  # latents that share an fp8 scale


def rope_table(rope_dim: int, positions: int = 64, device: torch.device | None = None) -> torch.Tensor:
    """float32 [positions, rope_dim]: cosines, then sines."""
    half = rope_dim // 2
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * 100.0 ** (-torch.arange(half) / half)
    return torch.cat([angles.cos(), angles.sin()], -1).float().to(device)


def turn(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, ..., P] turned, as complex numbers in float64."""
    half = table.shape[1] // 2
    rows = table[positions].double().view(len(positions), *(1,) * (x.dim() - 2), 2 * half)
    pairs = x.double().unflatten(-1, (half, 2) if interleaved else (2, half)).movedim(-1 if interleaved else -2, 0)
    turned = torch.complex(pairs[0], pairs[1]) * torch.complex(rows[..., :half], rows[..., half:])
    return torch.stack([turned.real, turned.imag], -1 if interleaved else -2).flatten(-2)


def read_latents(latents: torch.Tensor, slots: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents [T, R] and rope parts [T, P] at `slots`, float64."""
    rows = latents[slots // latents.shape[1], slots % latents.shape[1]].contiguous()
    if latents.dtype != torch.uint8:
        return rows[:, :rank].double(), rows[:, rank:].double()
    head = rank + 4 * -(-rank // SCALE_BLOCK)
    codes = rows[:, :rank].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, rank:head].contiguous().view(torch.float32).double().repeat_interleave(SCALE_BLOCK, 1)[:, :rank]
    return codes * scales, rows[:, head:].contiguous().view(torch.bfloat16).double()


def read_index_keys(keys: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The index keys [T, E] at `slots`, float64."""
    page, offset = slots // page_size, slots % page_size
    if keys.dtype != torch.uint8:
        return keys[page, offset].double()
    size = keys.shape[1] // page_size - 4
    codes = keys[:, : page_size * size].reshape(-1, page_size, size)[page, offset].view(torch.float8_e4m3fn)
    scales = keys[:, page_size * size :].reshape(-1, page_size, 4)[page, offset].contiguous().view(torch.float32)
    return codes.double() * scales.double()


def assert_near_e4m3(actual: torch.Tensor, expected: torch.Tensor, block: int) -> None:
    """Within e4m3's rounding (1/16 of the value, at least half the smallest step) of each block of the last dimension,
    and a bfloat16's on top."""
    for start in range(0, expected.shape[-1], block):
        part, wanted = actual[..., start : start + block].double(), expected[..., start : start + block]
        scale = wanted.abs().amax(-1, keepdim=True) / 448
        allowed = torch.maximum(wanted.abs() / 16, scale * 2**-10) * 1.01 + wanted.abs() * 0.01 + scale * 1e-4
        assert ((part - wanted).abs() <= allowed).all(), f"off by {((part - wanted).abs() / allowed).max()} roundings"
