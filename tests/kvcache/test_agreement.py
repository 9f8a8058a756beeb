"""What ranks agree to be over: against a naive settlement over all ranks, one operation at a time."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.kvcache import InvariantError, Stream, agree, assert_same_state
from benthic.kvcache.commands import COUNTS, DONE, FAILED, SETTLES_IN_ORDER, Agreed

Windows = tuple[tuple[int, ...], ...]
Reports = list[dict[int, int]]  # by rank


@st.composite
def problems(draw: st.DrawFn) -> tuple[Windows, Reports]:
    """Operations in flight by stream, and what each of 1 … 8 ranks has reported."""
    windows: list[tuple[int, ...]] = []
    next_id = 1
    for _ in Stream:
        length = draw(st.integers(0, 4))
        windows.append(tuple(range(next_id, next_id + length)))
        next_id += length
    ranks = draw(st.integers(1, 8))
    reports: Reports = [{} for _ in range(ranks)]
    for stream, window in enumerate(windows):
        values = st.integers(1, 6) if stream in COUNTS else st.sampled_from([FAILED, DONE, DONE, DONE])
        for op in window:
            slow = draw(st.sampled_from([0.0, 0.0, 0.5]))
            for seen in reports:
                if not slow or draw(st.booleans()):
                    seen[op] = draw(values)
    return tuple(windows), reports


def naive(windows: Windows, reports: Reports) -> list[Agreed]:
    """The least of all reports settles an operation that every rank has reported; copies stand in a queue."""
    settled = []
    for stream in Stream:
        for op in windows[stream]:
            values = [seen.get(op) for seen in reports]
            if None not in values:
                settled.append(Agreed(op, min(v for v in values if v is not None)))
            elif stream in (Stream.BACKUP, Stream.LOADBACK, Stream.GATHER):
                break
    return settled


def agree_on_each(windows: Windows, reports: Reports) -> list[tuple[Agreed, ...]]:
    """`agree` as every rank calls it, over a reduction of the vectors that the ranks hand in."""
    vectors: list[Sequence[int]] = []

    def hand_in(vector: Sequence[int]) -> Sequence[int]:
        vectors.append(tuple(vector))
        return vector

    for seen in reports:
        agree(windows, seen, hand_in)
    least = [min(values) for values in zip(*vectors, strict=True)]

    def reduced(vector: Sequence[int]) -> Sequence[int]:
        assert len(vector) == len(least), "the layout comes from replicated state"
        return least

    return [agree(windows, seen, reduced) for seen in reports]


@given(problems())
def test_what_is_over_everywhere_is_over_for_everybody(problem: tuple[Windows, Reports]) -> None:
    windows, reports = problem
    results = agree_on_each(windows, reports)
    assert [list(result) for result in results] == [naive(windows, reports)] * len(reports)


def windows_of(**streams: tuple[int, ...]) -> Windows:
    return tuple(streams.get(stream.name.lower(), ()) for stream in Stream)


@pytest.mark.parametrize("stream", Stream)
def test_copies_settle_in_order_and_disk_operations_in_any(stream: Stream) -> None:
    windows = windows_of(**{stream.name.lower(): (7, 8, 9)})
    assert agree(windows, {8: DONE}, list) == (() if stream in SETTLES_IN_ORDER else (Agreed(8, DONE),))
    assert agree(windows, {7: DONE, 9: DONE}, list)[0] == Agreed(7, DONE)


def test_a_copy_that_hangs_holds_up_no_other_stream() -> None:
    windows = windows_of(backup=(1, 2), loadback=(3,), reload=(4, 5))
    assert agree(windows, {2: DONE, 3: DONE, 5: 4}, list) == (Agreed(3, DONE), Agreed(5, 4))


def test_a_failure_anywhere_is_a_failure_everywhere() -> None:
    windows = windows_of(backup=(1,), durable=(2,))
    assert agree(windows, {1: DONE, 2: DONE}, lambda _: [FAILED, DONE]) == (Agreed(1, FAILED), Agreed(2, DONE))


def test_a_count_is_the_first_page_that_any_rank_lacks() -> None:
    # two owners, 6 pages: rank 0 lacks its page 4, rank 1 its page 3; rank 1 has pages 1 and 5
    assert agree(windows_of(reload=(1,)), {1: 1 + 4}, lambda mine: [min(mine[0], 1 + 3)]) == (Agreed(1, 1 + 3),)


def test_nothing_in_flight_means_no_collective() -> None:
    def collective(_: Sequence[int]) -> Sequence[int]:
        raise AssertionError("a rank has entered a collective alone")

    assert agree(windows_of(), {99: DONE}, collective) == ()


def test_something_in_flight_means_one_collective_whatever_this_rank_has_seen() -> None:
    calls: list[Sequence[int]] = []

    def collective(vector: Sequence[int]) -> Sequence[int]:
        calls.append(list(vector))
        return [0] * len(vector)

    assert agree(windows_of(backup=(3, 4), drain=(5,)), {}, collective) == ()
    assert agree(windows_of(backup=(3, 4), drain=(5,)), {4: DONE, 5: DONE}, collective) == ()
    assert calls == [[0, 0, 0], [0, DONE, DONE]]


class Recorded:
    """A reduction of one rank alone; keeps what it hands in."""

    def __init__(self) -> None:
        self.vectors: list[Sequence[int]] = []

    def __call__(self, vector: Sequence[int]) -> Sequence[int]:
        self.vectors.append(tuple(vector))
        return vector


class Replayed:
    """A reduction over all ranks whose results are known; `left` are those not asked for yet."""

    def __init__(self, results: Sequence[Sequence[int]]) -> None:
        self.left = list(results)

    def __call__(self, vector: Sequence[int]) -> Sequence[int]:
        return self.left.pop(0)


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=8), st.booleans())
def test_every_rank_notices_a_state_that_differs_anywhere(digests: list[bytes], same: bool) -> None:
    digests = digests[:1] * len(digests) if same else digests
    ranks = [Recorded() for _ in digests]
    for digest, rank in zip(digests, ranks, strict=True):
        assert_same_state(3, digest, rank)
    rounds = zip(*[rank.vectors for rank in ranks], strict=True)
    least = [[min(values) for values in zip(*vectors, strict=True)] for vectors in rounds]
    for digest in digests:
        replayed = Replayed(least)
        if len(set(digests)) == 1:
            assert_same_state(3, digest, replayed)
        else:
            with pytest.raises(InvariantError, match=f"parted in tick 3: .*{digest.hex()}"):
                assert_same_state(3, digest, replayed)
        assert not replayed.left, "both collectives are entered, whatever the first says"


def test_the_digests_of_parted_ranks_are_both_in_the_message() -> None:
    mine, other = bytes(range(32)), bytes(range(28)) + b"\x00\x00\x01\x00"
    words = [int.from_bytes(other[i : i + 4], "big") for i in range(0, 32, 4)]
    others = iter([words, [-word for word in words]])
    with pytest.raises(InvariantError, match=mine.hex()) as raised:
        assert_same_state(9, mine, lambda vector: list(map(min, vector, next(others))))
    assert "tick 9" in str(raised.value)
    assert str(words[-1]) in str(raised.value)
