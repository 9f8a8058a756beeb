"""Compares two greedy runs: they must agree up to the first token that rounding may decide."""

from collections.abc import Sequence

import torch


def top_gaps(logits: torch.Tensor) -> list[float]:
    """How far the best logit of each row of [n, vocabulary] lies above the second best."""
    best = logits.float().topk(2, dim=-1).values
    gaps: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return gaps


def assert_same_greedy(actual: Sequence[int], expected: Sequence[int], gaps: Sequence[float], tolerance: float) -> int:
    """Tokens agree up to the first whose two best logits are closer than `tolerance`; returns how many were compared.

    `gaps` are those of the expected run (`top_gaps`), one a token. A run that is merely shorter is a failure too.
    """
    decided = next((i for i, gap in enumerate(gaps) if gap < tolerance), len(gaps))
    wanted = list(expected[:decided])
    assert len(gaps) >= len(expected), f"{len(expected)} tokens but {len(gaps)} gaps"
    got = list(actual[: len(wanted)])
    first = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    assert got == wanted, (
        f"token {first} of {len(wanted)}: {got[first : first + 1]} instead of {wanted[first : first + 1]}, though the "
        f"two best logits are {gaps[first]:.4g} apart (tolerance {tolerance:g})"
    )
    return len(wanted)
