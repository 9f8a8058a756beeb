"""The replay against outcomes worked out by hand, and against a set of prefixes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.simulation import Report, Setup, Trace, read_trace, replay
from benthic.simulation.replay import Replay
from tests.simulation.traces import most_that_can_be_found, trace_of

REAL = Path(__file__).parents[1] / "data" / "traces" / "conversation_first_300.jsonl"
A, B, C, D = [1, 2, 3], [11, 12, 13], [21, 22, 23], [31, 32, 33]


def outcome(prompts: Sequence[Sequence[int]], **sizes: Any) -> Report:
    return replay(trace_of(prompts), Setup(l1_free_pages=0, **sizes))


def test_without_limits_every_prefix_that_came_before_is_found_in_l1() -> None:
    report = outcome([A, [1, 2, 4], A])
    assert report.found == {"l1": 2 + 3, "l2": 0, "l3": 0}
    assert report.hit_share == 5 / 9
    assert report.evicted == {"l1": 0, "l2": 0, "l3": 0}


def test_an_id_behind_another_prefix_is_another_page() -> None:
    assert outcome([[1, 2], [3, 2], [2]]).hit_share == 0


def test_l1_alone_forgets_what_it_has_no_room_for() -> None:
    report = outcome([A, B, A], l1_pages=4, l2_pages=0)
    assert sum(report.found.values()) == 0
    assert report.evicted == {"l1": 6, "l2": 0, "l3": 0}  # A for B, B for A; a node goes whole


def test_what_l1_has_dropped_is_found_in_l2() -> None:
    report = outcome([A, B, A], l1_pages=4, l2_pages=100, l3_pages=0)
    assert report.found == {"l1": 0, "l2": 3, "l3": 0}
    assert report.evicted == {"l1": 6, "l2": 0, "l3": 0}
    assert report.counters.loaded_back == 2  # the last page is computed anew


def test_what_l2_has_dropped_too_is_found_on_disk() -> None:
    report = outcome([A, B, C, A], l1_pages=4, l2_pages=8)
    assert report.found == {"l1": 0, "l2": 0, "l3": 3}
    assert report.evicted == {"l1": 9, "l2": 6, "l3": 0}  # of L2: A for C, then B for A
    assert report.counters.reloaded == 3
    assert report.l3_pages == 9


def test_the_disk_collects_the_tail_of_the_oldest_first() -> None:
    """9 of 10 slots hold A, B, C; D makes 12, beyond 90 %: 4 go, to be at 85 %: all of A and the tail of B."""
    report = outcome([A, B, C, D, B], l1_pages=4, l2_pages=8, l3_pages=10)
    assert report.found == {"l1": 0, "l2": 0, "l3": 2}
    assert report.evicted["l3"] == 4


@pytest.mark.parametrize(("prompts", "of_a", "of_b"), [([A, B, C, D], 0, 3), ([A, B, C, [*A, 4], D], 3, 0)])
def test_an_admission_keeps_its_pages_on_disk_young(prompts: list[list[int]], of_a: int, of_b: int) -> None:
    """A is used again before D makes room, though found in L1: B goes in its place."""
    trace = trace_of(prompts)
    replayed = Replay(trace, Setup(l2_pages=100, l3_pages=11))
    while not replayed.done:
        replayed.step()
    floor = replayed.workers.floor
    assert floor is not None
    assert floor.num_leading(trace.requests[0].hashes, 0) == of_a
    assert floor.num_leading(trace.requests[1].hashes, 0) == of_b


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_the_policy_reaches_the_core(policy: str) -> None:
    """Both copy A only later than at its first coming, if at all."""
    report = outcome([A, B], l1_pages=100, l2_pages=100, l3_pages=0, l2_policy=policy)
    assert report.counters.backed_up == 0


def test_write_back_copies_what_background_eviction_drops() -> None:
    trace = trace_of([A, B, A])
    report = replay(trace, Setup(l1_pages=7, l1_free_pages=3, l2_pages=100, l3_pages=0, l2_policy="write_back"))
    assert report.counters.backed_up > 0
    assert report.found["l2"] == 3


def test_a_prompt_that_many_bring_at_once_is_computed_once() -> None:
    report = replay(trace_of([A] * 5, apart_s=0), Setup(max_running=2, l2_pages=0))
    assert report.found["l1"] == 12
    assert report.num_requests == 5


def test_what_is_longer_than_l1_is_refused_and_counts_nowhere() -> None:
    report = outcome([[1, 2, 3, 4, 5], A, A], l1_pages=4, l2_pages=0)
    assert (report.num_refused, report.num_requests, report.num_pages) == (1, 2, 6)
    assert report.hit_share == 0.5


def test_answers_take_room_too() -> None:
    trace = trace_of([A], output_tokens=600)  # ends in a fifth page
    assert replay(trace, Setup(l1_pages=4, l2_pages=0)).num_refused == 1
    assert replay(trace, Setup(l1_pages=5, l2_pages=0)).num_refused == 0


def test_requests_end_when_they_are_computed() -> None:
    trace = trace_of([A], output_tokens=300)
    report = replay(trace, Setup(l2_pages=0, prefill_tokens_per_s=1000, decode_tokens_per_s=30))
    assert report.trace_s == pytest.approx((3 * 512 - 10) / 1000 + 300 / 30)


def test_a_faster_replay_is_shorter_and_finds_the_same() -> None:
    slow, fast = (replay(trace_of([A, B, A]), Setup(speed=speed)) for speed in (1, 10))
    assert fast.trace_s < slow.trace_s / 5
    assert fast.found == slow.found


def test_the_series_adds_up_to_the_totals() -> None:
    report = outcome([A, B, C, A, B, C], l1_pages=4, l2_pages=8, l3_pages=10)
    for tier in ("l1", "l2", "l3"):
        assert sum(bucket.found[tier] for bucket in report.buckets) == report.found[tier]
        assert sum(bucket.evicted[tier] for bucket in report.buckets) == report.evicted[tier]
    assert sum(bucket.pages for bucket in report.buckets) == report.num_pages == 18


def test_tick_times_come_from_the_clock_that_is_given() -> None:
    seconds = iter(range(1_000_000))
    times = replay(trace_of([A]), Setup(l2_pages=0), clock=lambda: float(next(seconds))).tick_us
    assert (times.median, times.p99, times.max) == (1e6, 1e6, 1e6)
    assert times.count >= 2


def test_progress_ends_with_all() -> None:
    told: list[int] = []
    replay(trace_of([A, B, [1] * 9]), Setup(l1_pages=4, l2_pages=0), on_progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 3


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(prompts, st.sampled_from([1, 2, 3]), st.sampled_from([0.0, 0.5, 30.0]), st.sampled_from([0, None]))
def test_without_limits_the_share_is_that_of_a_set_of_prefixes(
    prompts: list[list[int]], owners: int, apart_s: float, l2_pages: int | None
) -> None:
    report = replay(trace_of(prompts, apart_s), Setup(owners=owners, l2_pages=l2_pages, max_running=3))
    assert sum(report.found.values()) == most_that_can_be_found(prompts)
    assert report.hit_share == most_that_can_be_found(prompts) / sum(map(len, prompts))


@st.composite
def small_setups(draw: st.DrawFn) -> Setup:
    return Setup(
        owners=draw(st.sampled_from([1, 2, 4])),
        l1_pages=draw(st.integers(4, 20)),
        l1_free_pages=draw(st.integers(0, 3)),
        l2_pages=draw(st.sampled_from([1, 2, 5, 12, 30, None])),
        l3_pages=draw(st.sampled_from([0, 3, 10, 40, None])),
        l2_policy=draw(st.sampled_from(["write_through", "write_through_selective", "write_back"])),
        max_running=draw(st.sampled_from([1, 2, 8])),
        disk_gb_per_s=draw(st.sampled_from([0.9, 3, 100])),  # near 0.9, reading is hardly faster than computing
    )


@settings(deadline=None, max_examples=100)
@given(prompts, st.sampled_from([0.0, 0.2, 5.0]), small_setups())
def test_small_tiers_end_whole_and_find_no_more_than_there_is(
    prompts: list[list[int]], apart_s: float, setup: Setup
) -> None:
    replayed = Replay(trace_of(prompts, apart_s), setup)
    while not replayed.done:
        replayed.step()
    replayed.core.check()
    assert not replayed.core.runs
    assert not replayed.core.reloads.holds
    report = replayed.report()
    assert report.num_requests + report.num_refused == len(prompts)
    assert sum(report.found.values()) <= most_that_can_be_found(prompts)
    assert min(report.found.values()) >= 0
    if setup.l3_pages:
        assert report.l3_pages <= setup.l3_pages * setup.owners


@pytest.fixture(scope="module")
def real() -> Trace:
    return read_trace(REAL, 512)


def test_a_cut_of_a_real_trace_without_limits(real: Trace) -> None:
    seen: set[bytes] = set()
    found = 0
    for request in real.requests:
        found += sum(page in seen for page in request.hashes)
        seen.update(request.hashes)
    assert found > 0
    for owners in (1, 4):
        report = replay(real, Setup(owners=owners))
        assert report.hit_share == found / real.num_pages
        assert report.num_requests == 300


def test_a_cut_of_a_real_trace_through_all_tiers(real: Trace) -> None:
    """Deterministic, and a larger disk finds more."""
    setup = Setup(l1_pages=2000, l2_pages=3000, l3_pages=6000)
    first, second = replay(real, setup), replay(real, setup)
    assert (first.found, first.evicted, first.counters) == (second.found, second.evicted, second.counters)
    assert min(first.found.values()) > 0
    assert min(first.evicted.values()) > 0
    assert replay(real, replace(setup, l3_pages=None)).hit_share > first.hit_share
