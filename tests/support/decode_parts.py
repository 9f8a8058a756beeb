"""Decode rows dealt out over ranks by pages, and the merge of what the ranks found; for the kernels of parts."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from benthic.attention.selection_merge import own_positions

Part = tuple[torch.Tensor, torch.Tensor]


def own_pages(
    table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, rank: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's page table [B, at least 1] and tokens [B]; page i of a row is with rank i % size."""
    lens = [sum(at // page_size % size == rank for at in range(length)) for length in seq_lens.tolist()]
    own = table[:, rank::size]
    own = own if own.shape[1] else table[:, :1]
    return own.contiguous(), torch.tensor(lens, dtype=torch.int32, device=table.device)


def own_selected(selected: torch.Tensor, page_size: int, rank: int, size: int) -> torch.Tensor:
    """`own_positions` of a rank without a group."""
    return own_positions(selected, page_size, SimpleNamespace(rank=rank, size=size))  # type: ignore[arg-type]


def merged(parts: Sequence[Part]) -> torch.Tensor:
    """Attention over all parts' keys, float64."""
    outs, sums = (torch.stack([part[i].double() for part in parts]) for i in range(2))
    return (outs * sums.softmax(0).unsqueeze(-1)).sum(0)


def assert_same_part(actual: Part, expected: Part, tolerance: float, empty: torch.Tensor) -> None:
    """Close to each other; exactly 0 and -inf, and only there, in the rows of `empty` [B], bool."""
    assert actual[0].dtype == actual[1].dtype == torch.float32
    for out, lse in (actual, expected):
        assert not out[empty].any()
        assert (lse[empty] == float("-inf")).all()
        assert lse[~empty].isfinite().all()
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
