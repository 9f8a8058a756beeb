"""The merge of the ranks' candidates is the exact best K, ties and all."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.attention.selection_merge import Candidates, num_candidates, own_positions
from benthic.kernels.topk_select import topk_select
from tests.support.thread_ranks import ThreadCollectives, run_ranks


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([2, 3, 4]), page=st.sampled_from([1, 2, 4]), topk=st.integers(1, 12))
def test_any_scores(data: st.DataObject, size: int, page: int, topk: int) -> None:
    values = st.sampled_from([float("-inf"), -1.0, -0.0, 0.0, 0.5, 1.0])  # few, so that many are equal
    rows = data.draw(st.lists(st.lists(values, min_size=1, max_size=40), min_size=1, max_size=3))
    width = num_candidates(max(map(len, rows)), page, size, topk)

    def body(group: ThreadCollectives) -> torch.Tensor:
        found = Candidates(len(rows), width, page, group, torch.device("cpu"))
        for row, scores in enumerate(rows):
            own = [score for at, score in enumerate(scores) if at // page % size == group.rank]
            if own:
                local = torch.tensor([own])
                best = topk_select(local, torch.tensor([len(own)], dtype=torch.int32), width)
                found.put(torch.tensor([row]), local, best)
        return found.merged(topk)

    for merged in run_ranks(size, body):
        assert merged.shape == (len(rows), topk)
        assert merged.dtype == torch.int32
        for chosen, scores in zip(merged.tolist(), rows, strict=True):
            best = sorted(range(len(scores)), key=lambda at, s=scores: (-s[at], at))[:topk]  # type: ignore[misc]
            assert chosen == best + [-1] * (topk - len(best))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([2, 3, 4]), page=st.sampled_from([1, 2, 4]), topk=st.integers(1, 12))
def test_own_positions_of_any_selection(data: st.DataObject, size: int, page: int, topk: int) -> None:
    positions = st.lists(st.integers(0, 60), max_size=topk, unique=True)
    rows = data.draw(st.lists(positions, min_size=1, max_size=4))
    selected = torch.tensor([row + [-1] * (topk - len(row)) for row in rows], dtype=torch.int32)
    for rank in range(size):
        own = own_positions(selected, page, SimpleNamespace(rank=rank, size=size))  # type: ignore[arg-type]
        assert own.shape == selected.shape
        assert own.dtype == torch.int32
        assert own.stride(1) == 1
        for found, row in zip(own.tolist(), rows, strict=True):
            # a position's place is the number of this rank's positions before it
            mine = [at for at in range(61) if at // page % size == rank]
            wanted = [mine.index(at) for at in row if at in mine]
            assert found == wanted + [-1] * (topk - len(wanted))
