"""Rows of scores that are hard to select from, and the plain answer."""

import math
from collections.abc import Callable

import torch

_KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # of normal numbers and uniform ones
    "normal": lambda x, u: x,
    "ties": lambda x, u: (x * 1.5).round(),
    "zeros": lambda x, u: torch.where(u < 0.4, 0.0, torch.where(u < 0.8, -0.0, x)),
    "minus infinity": lambda x, u: torch.where(u < 0.7, -math.inf, x),
    "infinity": lambda x, u: torch.where(u < 0.5, math.inf, x),
    "denormal": lambda x, u: torch.where(u < 0.5, 1e-45, torch.where(u < 0.7, -1e-45, 0.0)),
    "equal": lambda x, u: torch.full_like(x, -2.5),
    "rising": lambda x, u: torch.arange(x.numel()).view_as(x).float(),
    "one far out": lambda x, u: torch.where(u < 0.01, 1e30 * x, 1.0 + x * 1e-6),
}
SCORES = tuple(_KINDS)


def make_scores(kind: str, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """float32 [rows, width] of one of SCORES."""
    rng = torch.Generator().manual_seed(seed)
    shape = (rows, width)
    return _KINDS[kind](torch.randn(shape, generator=rng), torch.rand(shape, generator=rng)).clone()


def sorted_best(scores: list[float], k: int) -> list[int]:
    """Positions of the k largest, of equal ones the lowest, in rising order."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])
