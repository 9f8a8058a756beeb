"""Rotary position embedding (https://arxiv.org/abs/2104.09864) in half-split order: component i turns with i + d/2."""

import math
from dataclasses import dataclass

import torch

from benthic.kernels.rope import rope


@dataclass(frozen=True, slots=True)
class Angles:
    """The turns of T tokens, shared by all layers."""

    positions: torch.Tensor  # int64 [T]
    cos: torch.Tensor | None  # [T, 1, head_dim], model dtype; None on a GPU, where the kernel reads a table
    sin: torch.Tensor | None  # the same, the first half negated


class Rope:
    """Turns q and k by position. On a GPU a table of all positions is made once (float32 [max_position, head_dim])."""

    __slots__ = ("_frequencies", "_table")

    def __init__(self, frequencies: torch.Tensor, max_position: int) -> None:
        self._frequencies = frequencies  # float32 [head_dim / 2]
        self._table = self._make_table(max_position) if frequencies.is_cuda else None

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """For positions int64 [T], below max_position."""
        if self._table is not None:
            return Angles(positions, None, None)
        turns = positions.float().unsqueeze(1) * self._frequencies
        cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
        return Angles(positions, torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))

    def turn(self, x: torch.Tensor, num_heads: int, angles: Angles) -> torch.Tensor:
        """x [T, H + G, head_dim], the H query heads first, turned; x itself may change."""
        if self._table is not None:
            rope(x[:, :num_heads], x[:, num_heads:], self._table, angles.positions)
            return x
        assert angles.cos is not None
        assert angles.sin is not None
        return (x * angles.cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(angles.sin))

    def _make_table(self, max_position: int) -> torch.Tensor:
        positions = torch.arange(max_position, device=self._frequencies.device)
        turns = positions.float().unsqueeze(1) * self._frequencies
        return torch.cat((turns.cos(), turns.sin()), -1)


def default_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]: theta^(-2i / head_dim)."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))


def llama3_frequencies(
    frequencies: torch.Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> torch.Tensor:
    """Llama 3.1's stretch: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = original_max_position / low_freq_factor, original_max_position / high_freq_factor
    stretched = torch.where(wavelengths > low, frequencies / factor, frequencies)
    smooth = (original_max_position / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where((wavelengths >= high) & (wavelengths <= low), blended, stretched)
