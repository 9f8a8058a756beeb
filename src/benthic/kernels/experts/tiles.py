"""Tile sizes of the expert kernels by the number of (token, expert) pairs; tuned on the device of kernels/tiles.py."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """A program's share: `rows` pairs of one expert against `columns` outputs, `depth` inputs at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class SingleTiles:
    """A program's share where there is one token: `rows` rows of the weights, `depth` inputs at a time."""

    rows: int
    depth: int
    warps: int


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """How `experts` runs: tiles of both products, or what takes their place."""

    rows: int  # of both products' tiles
    up: ExpertTiles
    down: ExpertTiles
    grouped: bool = False  # torch._grouped_mm's products
    single: tuple[SingleTiles, SingleTiles] | None = None  # one token's products


def _plan(up: ExpertTiles, down: ExpertTiles, grouped: bool = False) -> ExpertPlan:
    assert up.rows == down.rows, "both products share the list of row tiles"
    return ExpertPlan(up.rows, up, down, grouped)


_SINGLE = {2: (SingleTiles(4, 512, 2), SingleTiles(2, 512, 2)), 4: (SingleTiles(8, 256, 4), SingleTiles(4, 512, 4))}
# (largest mean number of rows an expert, plan), by bytes of an element
_PLANS: dict[int, tuple[tuple[float, ExpertPlan], ...]] = {
    2: (
        (8, _plan(ExpertTiles(16, 64, 128, 2, 4), ExpertTiles(16, 64, 128, 2, 4))),
        (24, _plan(ExpertTiles(32, 128, 128, 4, 3), ExpertTiles(32, 128, 128, 4, 3))),
        (96, _plan(ExpertTiles(64, 128, 64, 4, 4), ExpertTiles(64, 128, 64, 4, 4))),
        (float("inf"), _plan(ExpertTiles(128, 256, 64, 8, 3), ExpertTiles(128, 256, 64, 8, 3))),
    ),
    4: (
        (8, _plan(ExpertTiles(16, 32, 32, 2, 3), ExpertTiles(16, 32, 32, 2, 3))),
        (float("inf"), _plan(ExpertTiles(32, 64, 32, 4, 2), ExpertTiles(32, 64, 32, 4, 2))),
    ),
}


def plan_for(tokens: int, k: int, num_experts: int, dtype: torch.dtype) -> ExpertPlan:
    """The plan for that many tokens, from static numbers only, so that a graph's launches never change."""
    mean = tokens * k / num_experts
    plan = next(plan for largest, plan in _PLANS[dtype.itemsize] if mean <= largest)
    return replace(plan, single=_SINGLE[dtype.itemsize]) if tokens == 1 else plan
