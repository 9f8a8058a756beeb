"""topk_select: Triton, the reference and the CPU's against a sort by (-score, position)."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.kernels.topk_select import topk_select, topk_select_cpu, topk_select_reference
from benthic.kernels.topk_select.kernel import topk_select_triton
from benthic.kernels.topk_select.plan import SelectSizes, parts_of
from tests.support.topk_cases import SCORES, make_scores, sorted_best
from tests.support.triton_interpreter import DEVICE

SMALL = SelectSizes(16, 4, 16, 16, 4, 1)  # rows of a few hundred are long ones
Select = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], torch.Tensor]


def _triton(parts: tuple[int, int] | None) -> Select:
    return lambda scores, lens, k, out: topk_select_triton(scores, lens, k, out, SMALL, parts)


def _check(select: Select, scores: torch.Tensor, lens: list[int], k: int) -> torch.Tensor:
    out = torch.full((len(lens), k), -9, dtype=torch.int32, device=scores.device)
    select(scores, torch.tensor(lens, dtype=torch.int32, device=scores.device), k, out)
    for row, length in enumerate(lens):
        got = out[row].tolist()
        assert sorted(got[: min(k, length)]) == sorted_best(scores[row, :length].tolist(), k)
        assert got[length:] == [-1] * max(0, k - length)
        if length <= k:
            assert got[:length] == list(range(length))
    return out


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("k", [1, 33])
def test_kernel_picks_what_a_sort_picks(k: int, kind: str) -> None:
    scores = make_scores(kind, 2, 200, seed=k).to(DEVICE)
    _check(_triton((1, 200)), scores, [200, 129], k)
    _check(_triton((2, 100)), scores, [200, 101], k)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("select", [topk_select_reference, topk_select])
def test_others_pick_what_a_sort_picks(select: Select, kind: str) -> None:
    scores = make_scores(kind, 3, 300, seed=1).to(DEVICE)
    for k in (1, 16, 50, 299):
        _check(select, scores, [300, 299, 129], k)
        _check(topk_select_cpu, scores.cpu(), [300, 299, 129], k)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("parts", [(1, 320), (2, 160)])
def test_a_sample_that_misleads(parts: tuple[int, int], sign: float) -> None:
    """Every tenth or twentieth score is looked at: with those the largest, or the smallest, both guesses are wrong."""
    scores = make_scores("normal", 2, 320)
    scores[:, ::10] += 100 * sign
    for k in (5, 60):
        _check(_triton(parts), scores.to(DEVICE), [320, 320], k)


def test_places_as_far_apart_as_they_go() -> None:
    scores = make_scores("normal", 2, 200)
    edges = torch.tensor([math.inf, -math.inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-45])
    scores = torch.where(scores > 0.3, scores, edges[(scores.abs() * 1000).long() % len(edges)])
    for k in (7, 90, 140):
        _check(_triton((1, 200)), scores.to(DEVICE), [200, 183], k)


@pytest.mark.parametrize("select", [_triton((1, 80)), _triton((2, 40)), topk_select_reference, topk_select])
def test_lengths_around_k(select: Select) -> None:
    k = 16
    lens = [0, 1, k - 1, k, k + 1, 40, 41, 40 + k, 41 + k, 80]
    _check(select, make_scores("normal", len(lens), 80).to(DEVICE), lens, k)


@pytest.mark.parametrize("select", [_triton(None), topk_select_reference, topk_select])
def test_k_larger_than_the_row(select: Select) -> None:
    scores = make_scores("ties", 2, 10).to(DEVICE)
    assert _check(select, scores, [10, 4], 25).tolist()[1] == [0, 1, 2, 3, *[-1] * 21]


@pytest.mark.parametrize("select", [_triton((1, 100)), _triton((2, 64)), topk_select_reference, topk_select])
def test_strided_rows_and_what_lies_behind_them(select: Select) -> None:
    """Aligned and unaligned rows of a wider matrix, NaN and infinity past the lengths."""
    for width, stride in ((100, 128), (99, 111)):
        scores = make_scores("zeros", 3, stride).to(DEVICE)[:, :width]
        lens = [90, 70, 33]
        for row, length in enumerate(lens):
            scores[row, length:] = (math.nan, math.inf, -math.nan)[row]
        _check(select, scores, lens, 16)


@pytest.mark.parametrize("select", [_triton(None), topk_select_reference, topk_select])
def test_no_rows(select: Select) -> None:
    assert _check(select, torch.empty(0, 5, device=DEVICE), [], 3).shape == (0, 3)


def test_the_plans_sizes_agree() -> None:
    """One row that the plan reads whole, and longer ones than it keeps as candidates."""
    _check(topk_select_triton, make_scores("ties", 1, 5000).to(DEVICE), [4999], 256)
    _check(topk_select_triton, make_scores("normal", 2, 5000).to(DEVICE), [5000, 2000], 256)


def test_the_order_does_not_depend_on_the_other_rows() -> None:
    scores = make_scores("normal", 3, 150).to(DEVICE)
    together = _check(_triton(None), scores, [150] * 3, 16)
    for row in range(3):
        assert torch.equal(_check(_triton(None), scores[row : row + 1], [150], 16)[0], together[row])


@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, -2.5, 3.0, 1e-45, -math.inf]), max_size=24), max_size=4),
    k=st.integers(1, 26),
)
@settings(max_examples=60, deadline=None)
def test_reference_and_cpu_pick_what_a_sort_picks(rows: list[list[float]], k: int) -> None:
    scores = torch.full((len(rows), 24), math.nan)
    for row, values in enumerate(rows):
        scores[row, : len(values)] = torch.tensor(values)
    for select in (topk_select_reference, topk_select_cpu):
        _check(select, scores, [len(values) for values in rows], k)


def test_parts_hold_more_than_k_and_cover_the_row() -> None:
    for rows in (1, 8, 300):
        for width in (100, 32768, 131072, 1 << 20):
            for k in (16, 2048, 20000):
                count, size = parts_of(rows, width, k, torch.device("cpu"))
                assert count * size >= width
                assert count == 1 or size > k


def test_shapes_that_do_not_fit_are_named() -> None:
    lens = torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        topk_select(torch.zeros(3, 4), lens, 2)
    with pytest.raises(ValueError, match="do not fit"):
        topk_select(torch.zeros(2, 4, dtype=torch.float64), lens, 2)
    with pytest.raises(ValueError, match="is not int32"):
        topk_select(torch.zeros(2, 4), lens, 2, torch.zeros(2, 3, dtype=torch.int32))
