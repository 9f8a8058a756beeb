"""Angles of latent attention's rotary embedding, with YaRN (https://arxiv.org/abs/2309.00071) where it is asked for.

One table serves the queries, the latents and the indexer; which components turn together is for who reads it.
"""

import math

import torch

from benthic.weights.rope_config import RopeConfig

_POSITIONS_AT_ONCE = 1 << 16  # float64 angles of a million positions would need a gigabyte


def latent_rope_table(rope: RopeConfig, rope_dim: int, max_position: int) -> torch.Tensor:
    """float32 [max_position, P] on the CPU: P/2 cosines, then P/2 sines, YaRN's amplitude in them.

    Computed in float64 and rounded once.
    """
    frequencies = latent_frequencies(rope, rope_dim)
    table = torch.empty((max_position, rope_dim), dtype=torch.float32)
    for first in range(0, max_position, _POSITIONS_AT_ONCE):
        positions = torch.arange(first, min(first + _POSITIONS_AT_ONCE, max_position), dtype=torch.float64)
        turns = positions.unsqueeze(1) * frequencies
        table[first : first + len(positions)] = torch.cat((turns.cos(), turns.sin()), -1) * rope.angle_gain
    return table


def latent_frequencies(rope: RopeConfig, rope_dim: int) -> torch.Tensor:
    """float64 [P / 2], radians a position: theta^(-2i / P), stretched as the rope's kind says."""
    frequencies = rope.theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, rope_dim)
    assert rope.kind == "default", f"the config lets no rope of kind {rope.kind} through"
    return frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, rope_dim: int) -> torch.Tensor:
    """Components that turn often over the original context keep their frequency, slow ones are divided by `factor`."""

    def component(rotations: float) -> float:
        """Which component turns `rotations` times over the original context."""
        wavelength = rope.original_max_position / (2 * math.pi * rotations)
        return rope_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(component(rope.beta_fast)), 0)
    high = min(math.ceil(component(rope.beta_slow)), rope_dim - 1)
    places = torch.arange(len(frequencies), dtype=torch.float64)
    slow = ((places - low) / max(high - low, 1e-3)).clamp(0, 1)  # 1e-3: a step, where both limits fall together
    return frequencies * (slow / rope.factor + 1 - slow)
