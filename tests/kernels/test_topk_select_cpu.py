"""The CPU's top-k against the reference's sort: the same positions, ties and odd shapes included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.kernels.topk_select import topk_select_cpu, topk_select_reference


def check(scores: torch.Tensor, lens: torch.Tensor, k: int) -> None:
    actual = topk_select_cpu(scores, lens, k, torch.empty(len(lens), k, dtype=torch.int32))
    expected = topk_select_reference(scores, lens, k, torch.empty(len(lens), k, dtype=torch.int32))
    for row, wanted, length in zip(actual.tolist(), expected.tolist(), lens.tolist(), strict=True):
        count = min(length, k)
        assert row[:count] == sorted(wanted[:count])
        assert row[count:] == [-1] * (k - count)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    k=st.integers(1, 100),
    spare=st.integers(0, 5),
    kind=st.sampled_from(["random", "coarse", "zeros", "infinite"]),
)
def test_ragged_rows(lens: list[int], k: int, spare: int, kind: str) -> None:
    scores = torch.randn(len(lens), max(lens) + spare, generator=torch.Generator().manual_seed(sum(lens)))
    if kind == "coarse":
        scores = scores.relu_().round()
    elif kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    elif kind == "infinite":
        scores[scores < 0.5] = float("-inf")
    for row, length in enumerate(lens):
        scores[row, length:] = float("nan")  # never looked at
    check(scores, torch.tensor(lens, dtype=torch.int32), k)


@pytest.mark.parametrize(("rows", "width", "k"), [(0, 40, 8), (130, 33, 8), (65, 8, 8), (3, 5000, 512)])
def test_many_rows_strided(rows: int, width: int, k: int) -> None:
    scores = torch.randn(rows, width + 7, generator=torch.Generator().manual_seed(k)).round(decimals=1)[:, :width]
    check(scores, torch.full((rows,), width, dtype=torch.int32), k)
