"""L3 beside the scheduler: held requests, their bounds and their usage; stops, flushes and a disk that hangs."""

from collections.abc import Callable

import pytest

from benthic.engine.core import PATIENT_S
from benthic.engine.request import State
from benthic.engine.tier_workers import TierWorkers
from benthic.kvcache.commands import FAILED, ClearDisk, Completion, Drain, Lookup, Reload, Spill, Stream, Touch
from benthic.messages import Abort, FlushCache, FlushDone, QueryState, Shutdown
from tests.support.engine_driver import Driver
from tests.support.fake_runner import greedy
from tests.support.fake_tiers import Shelf, Weather
from tests.support.tier_workload import prompt_of

PROMPT = prompt_of(33)  # 8 pages and a token
WHOLE = prompt_of(32)  # whole pages: the last of them is computed anew


def filled(*prompts: list[int]) -> tuple[Shelf, Shelf]:
    """A shelf that holds these prompts' pages, and the truth about them; the engine that wrote it has ended."""
    shelf: Shelf = {}
    truth: Shelf = {}
    d = with_disk(shelf, truth)
    for i, prompt in enumerate(prompts):
        d.run(d.submit(i, prompt, max_tokens=1))
    d.assert_no_leak()
    d.engine.close()
    return shelf, truth


def with_disk(shelf: Shelf, truth: Shelf, *, weather: Weather | None = None, **options: object) -> Driver:
    return Driver(l2_frames=64, disk=shelf, truth=truth, weather=weather, **options)  # type: ignore[arg-type]


def reopened(*prompts: list[int], weather: Weather | None = None, **options: object) -> Driver:
    """An engine after a restart: the disk alone has the prompts."""
    shelf, truth = filled(*prompts)
    return with_disk(shelf, truth, weather=weather, **options)


def tick_until(d: Driver, condition: Callable[[], bool], max_ticks: int = 400) -> None:
    for _ in range(max_ticks):
        if condition():
            return
        d.tick()
    raise AssertionError(f"not in {max_ticks} ticks")


def flushes(d: Driver) -> list[FlushDone]:
    return [r for r in d.replies if isinstance(r, FlushDone)]


def test_after_a_restart_the_prompt_comes_from_the_disk_then_from_l1():
    d = reopened(PROMPT)
    d.run(d.submit(1, PROMPT))
    d.run(d.submit(2, PROMPT))
    assert [d.seen[i].tokens for i in (1, 2)] == [greedy(PROMPT, 4)] * 2
    assert [d.seen[i].by_tier for i in (1, 2)] == [(0, 0, 32), (32, 0, 0)]
    assert d.engine.scheduler.totals.cached_tokens_l3 == 32
    d.assert_no_leak()


def test_a_whole_prompt_on_disk_leaves_its_last_page_to_compute():
    d = reopened(WHOLE)
    d.run(d.submit(1, WHOLE))
    assert d.seen[1].tokens == greedy(WHOLE, 4)
    assert d.seen[1].by_tier == (0, 0, 28)
    assert d.core.counters.reloaded == 7
    d.assert_no_leak()


def test_each_token_is_counted_in_the_tier_it_was_found_in():
    longer = PROMPT[:32] + prompt_of(33, 7)
    d = reopened(longer)
    d.run(d.submit(1, longer[:17]))  # 4 pages from the disk, now in all tiers
    d.run(FlushCache(1, ("l1",)))
    d.run(d.submit(2, longer[:9]))  # of these, 2 back into L1
    assert d.seen[2].by_tier == (0, 8, 0)
    d.run(d.submit(3, longer))
    assert d.seen[3].by_tier == (8, 8, 48)
    assert d.seen[3].tokens == greedy(longer, 4)
    d.assert_no_leak()


def test_who_waits_for_anothers_reload_has_its_pages_from_the_disk_too():
    """Unless the other is admitted before it and has brought them to L1."""
    tails = [PROMPT + prompt_of(4, 5 + i) for i in range(3)]
    d = reopened(PROMPT, weather=Weather(disk_ticks=(3, 3)))
    d.run(*(d.submit(i, tail) for i, tail in enumerate(tails)))
    assert d.core.counters.reloads == 1
    assert d.core.counters.reloaded == 8
    assert [d.seen[i].by_tier for i in range(3)] == [(0, 0, 32), (32, 0, 0), (32, 0, 0)]
    assert all(d.seen[i].tokens == greedy(tail, 4) for i, tail in enumerate(tails))
    d.assert_no_leak()
    # The one that started it goes away: who follows is the first to find the pages.
    d = reopened(PROMPT, weather=Weather(disk_ticks=(3, 3)))
    d.tick(*(d.submit(i, tail) for i, tail in enumerate(tails)))
    tick_until(d, lambda: bool(d.core.state.ops.of(Stream.RELOAD)))
    d.run(Abort((0,)))
    assert [d.seen[i].by_tier for i in (1, 2)] == [(0, 0, 32), (32, 0, 0)]
    d.assert_no_leak()


def test_landed_pages_are_locked_until_the_request_is_admitted():
    d = reopened(PROMPT, max_running=1)
    d.tick(d.submit(1, prompt_of(5, 3), max_tokens=30))
    d.tick(d.submit(2, PROMPT))
    request = d.engine.scheduler.requests[2]
    tick_until(d, lambda: request.state is State.WAITING and d.core.counters.reloaded == 8)
    assert request.hold is not None
    assert d.core.l2_lanes()[0].locked >= 8
    tick_until(d, lambda: d.seen[2].admissions == 1)
    assert request.hold is None
    assert not d.core.reloads.holds
    tick_until(d, lambda: not d.core.copying)
    assert d.core.l2_lanes()[0].locked == 0
    d.run()
    assert d.seen[2].by_tier == (0, 0, 32)
    d.assert_no_leak()


@pytest.mark.parametrize("ticks_before", range(12))
def test_an_abort_while_held_lets_the_reload_land_for_the_next(ticks_before):
    d = reopened(PROMPT, weather=Weather(disk_ticks=(4, 4), copy_ticks=(3, 3)))
    d.tick(d.submit(1, PROMPT, max_tokens=30))
    for _ in range(ticks_before):
        d.tick()
    was_held = bool(d.engine.scheduler.held)
    assert was_held == (ticks_before < 9)
    d.run(Abort((1,)))
    assert d.seen[1].finished is not None
    d.run(d.submit(2, PROMPT))
    assert d.seen[2].tokens == greedy(PROMPT, 4)
    assert d.seen[2].cached == 32
    d.assert_no_leak()


def test_a_queue_timeout_ends_a_held_request_and_lets_go_of_its_hold():
    d = reopened(PROMPT, queue_timeout_us=50_000)
    assert d.disk is not None
    d.disk.stuck = True
    d.tick(d.submit(1, PROMPT))
    tick_until(d, lambda: d.seen[1].finished is not None)
    assert d.seen[1].finished is not None
    assert d.seen[1].finished.status == 503
    assert not d.core.reloads.holds
    d.disk.stuck = False
    d.run()
    d.assert_no_leak()


def test_who_must_compute_every_row_is_not_held():
    d = reopened(PROMPT)
    d.tick(d.submit(1, PROMPT, prompt_logprobs=1))
    assert not d.engine.scheduler.held
    d.run()
    assert d.seen[1].cached == 0
    assert d.core.counters.holds == 0


def test_a_hanging_disk_costs_the_known_prompt_its_bound_and_the_others_nothing():
    """Case A10: the late reads give their frames back, and the time-out is counted."""
    weather = Weather(read_hangs=1.0, hang_ticks=3000)
    d = reopened(PROMPT, weather=weather)
    d.tick(d.submit(1, PROMPT), *(d.submit(i, prompt_of(20, i)) for i in range(2, 6)))
    tick_until(d, lambda: all(d.seen[i].finished is not None for i in range(2, 6)), max_ticks=40)
    assert d.seen[1].cached is None
    tick_until(d, lambda: d.seen[1].finished is not None, max_ticks=60)
    assert d.seen[1].tokens == greedy(PROMPT, 4)
    assert d.seen[1].by_tier == (0, 0, 0)
    assert d.core.counters.reload_timeouts >= 1
    tick_until(d, lambda: d.core.in_flight == len(d.core.state.ops.of(Stream.DRAIN)))
    assert d.core.l2_lanes()[0].private == 8, "the late reads' frames are out of use"
    assert not d.engine.idle
    assert d.engine.pause_s == PATIENT_S
    d.run(max_ticks=4000)
    assert d.core.l2_lanes()[0].private == 0
    d.assert_no_leak()


def test_a_disk_that_answers_nothing_at_all_holds_nobody_past_the_bound():
    d = reopened(PROMPT)
    assert d.disk is not None
    d.disk.stuck = True
    d.tick(*(d.submit(i, PROMPT + prompt_of(5, i)) for i in range(4)))
    tick_until(d, lambda: all(d.seen[i].finished is not None for i in range(4)), max_ticks=120)
    assert all(d.seen[i].tokens == greedy(PROMPT + prompt_of(5, i), 4) for i in range(4))
    d.disk.stuck = False
    d.run()
    d.assert_no_leak()


def test_what_is_read_slower_than_computed_is_not_waited_for():
    d = reopened(PROMPT)
    assert d.disk is not None
    d.disk.us_per_page_read = 2000
    d.engine._rate.measured(64, 64 * 400e-6)  # 1600 µs a page of 4
    d.run(d.submit(1, PROMPT))
    assert d.core.counters.holds == 0
    assert d.seen[1].cached == 0
    d = reopened(PROMPT)
    assert d.disk is not None
    d.disk.us_per_page_read = 1000
    d.engine._rate.measured(64, 64 * 400e-6)
    d.run(d.submit(1, PROMPT))
    assert d.core.counters.holds == 1
    assert d.seen[1].by_tier == (0, 0, 32)


@pytest.mark.parametrize(("read_us", "from_disk"), [(2000, 8), (1000, 32)])
def test_a_disk_whose_rate_is_not_known_is_measured_by_the_first_pages(read_us: int, from_disk: int):
    """The rate is there when the sample's answer is fetched, and not before: the same tick must decide by it."""
    d = reopened(PROMPT, reload_sample_pages=2)
    disk = d.disk
    assert disk is not None
    fetch = disk.poll

    def poll() -> list[Completion]:
        done = fetch()
        if any(c.op in d.core.state.ops.of(Stream.RELOAD) for c in done):
            disk.us_per_page_read = read_us
        return done

    disk.poll = poll  # type: ignore[method-assign]
    d.engine._rate.measured(64, 64 * 400e-6)  # 1600 µs a page of 4
    d.run(d.submit(1, PROMPT))
    assert (d.seen[1].tokens, d.seen[1].by_tier) == (greedy(PROMPT, 4), (0, 0, from_disk))
    assert d.core.counters.reloads == 1 + (from_disk == 32)
    d.assert_no_leak()


def test_a_page_of_a_sequence_takes_an_owners_time_over_the_owners():
    disk = Recorder()
    assert TierWorkers(rank=1, num_owners=4, disk=disk).read_us_per_page == 0  # type: ignore[arg-type]
    disk.us_per_page_read = 1001
    assert TierWorkers(rank=1, num_owners=4, disk=disk).read_us_per_page == 251  # type: ignore[arg-type]
    assert TierWorkers(rank=1, num_owners=1, disk=disk).read_us_per_page == 1001  # type: ignore[arg-type]


def test_a_preempted_request_is_not_held_again():
    d = reopened(PROMPT, l1_pages=14, max_running=2, l1_free_pages=0, max_request_tokens=56)
    d.tick(d.submit(1, PROMPT, max_tokens=15, priority=1))
    tick_until(d, lambda: d.seen[1].admissions == 1)
    d.run(d.submit(2, prompt_of(9, 3), max_tokens=15))
    assert d.engine.scheduler.totals.preemptions > 0
    assert d.seen[1].admissions > 1
    assert d.core.counters.holds == 2  # once each, at their arrival
    assert [d.seen[i].tokens for i in (1, 2)] == [greedy(PROMPT, 15), greedy(prompt_of(9, 3), 15)]
    assert d.seen[1].by_tier == (0, 0, 32)
    d.assert_no_leak()


def test_a_running_prefill_that_adopts_what_is_being_loaded_back_sits_out_beside_decodes():
    """It gave up waiting for the disk; another, later, did not, and brings the rest."""
    prompt, first = prompt_of(81), prompt_of(33, 4)
    d = reopened(prompt, chunk_tokens=4, l1_pages=99)
    assert d.disk is not None
    assert d.copies is not None
    d.disk.stuck = True
    d.tick(d.submit(1, prompt_of(5, 3), max_tokens=150), d.submit(2, prompt))
    tick_until(d, lambda: d.seen[2].computed > 8)
    d.disk.stuck = False
    d.tick(d.submit(3, prompt, priority=-1), d.submit(4, first, priority=-2))  # 4 takes all of each step for a while
    tick_until(d, lambda: d.core.counters.reloaded > 0)
    d.copies.held_back = True
    tick_until(d, lambda: d.core.loading_back)
    computed = d.seen[2].computed
    for _ in range(10):
        d.tick()
        assert d.runner.steps[-1].num_tokens == d.runner.steps[-1].num_decode
        assert d.core.loading_back
    assert d.seen[2].computed == computed
    d.copies.held_back = False
    d.run()
    assert d.seen[2].computed == computed + 1
    assert [d.seen[i].tokens for i in (2, 3, 4)] == [greedy(prompt, 4), greedy(prompt, 4), greedy(first, 4)]
    d.assert_no_leak()


def test_every_admission_makes_its_pages_young_on_disk_whatever_tier_they_came_from():
    d = reopened(PROMPT)
    assert d.disk is not None
    for i in (1, 2):
        d.run(d.submit(i, PROMPT))
    hashes = [h for h, page in d.truth.pages.items() if page in {tuple(PROMPT[i : i + 4]) for i in range(0, 32, 4)}]
    assert len(hashes) == 8
    ages = {d.disk.ages[h] for h in hashes}
    assert len(ages) == 1
    d.run(FlushCache(1, ("l1",)))
    d.run(d.submit(3, PROMPT[:17]))
    assert [d.disk.ages[h] - max(ages) for h in hashes] == [1] * 4 + [0] * 4


# --- the end, and flushes -------------------------------------------------------------------------------------------


def test_at_a_stop_what_ran_is_cut_off_and_goes_to_disk():
    shelf: Shelf = {}
    d = with_disk(shelf, {}, weather=Weather(copy_ticks=(4, 4), disk_ticks=(6, 6)))
    d.tick(d.submit(1, PROMPT, max_tokens=30), d.submit(2, prompt_of(21, 5), max_tokens=30))
    tick_until(d, lambda: len(d.seen[2].tokens) > 2)
    d.tick(Shutdown(5.0))
    assert d.engine.shutting_down
    assert d.engine.finish_by == pytest.approx(d.now + 5.0)
    d.engine.cut_off()
    assert d.engine.scheduler.idle
    assert d.engine.pages_pending > 0
    assert not d.engine.idle
    tick_until(d, lambda: d.engine.idle)
    assert d.engine.pages_pending == 0
    assert len(shelf) >= 13
    d.assert_no_leak()
    d.engine.close(1.0)
    assert d.disk is not None
    assert d.disk.closed


def test_a_stop_beside_a_hanging_disk_says_what_is_lost():
    shelf: Shelf = {}
    d = with_disk(shelf, {})
    assert d.disk is not None
    d.disk.stuck = True
    d.tick(d.submit(1, PROMPT, max_tokens=1))
    tick_until(d, lambda: not d.engine.computing)
    for _ in range(50):
        d.tick()
    assert not d.engine.idle
    assert d.engine.pages_pending == 8
    d.engine.close()
    assert not shelf


def test_a_flush_of_l3_waits_for_what_is_in_flight_and_answers_late_when_that_hangs():
    d = reopened(PROMPT)
    assert d.disk is not None
    old = bytes(32)
    d.disk.shelf[old] = (1, 2, 3, 4)
    d.disk.stuck = True
    d.tick(d.submit(1, PROMPT))
    d.tick(FlushCache(7, ("l1", "l2", "l3")))
    for _ in range(2900):
        d.tick()
    assert not flushes(d)
    assert d.seen[1].tokens == greedy(PROMPT, 4)
    for _ in range(200):
        d.tick()
    (late,) = flushes(d)
    assert late.token == 7
    assert "L3 is not empty yet" in late.message
    assert late.kept["l3"] == 9
    assert not d.engine.idle
    d.disk.stuck = False
    d.run()
    assert len(flushes(d)) == 1
    assert old not in d.disk.shelf
    assert len(d.disk.shelf) == 9  # the disk is used again: what was computed meanwhile has been written
    d.run(FlushCache(8, ("l3",)))
    done = flushes(d)[-1]
    assert (done.token, done.dropped, done.kept, done.message) == (8, {"l3": 9}, {"l3": 0}, "")
    assert not d.disk.shelf
    d.assert_no_leak()


def test_two_flushes_of_l3_at_once_are_both_answered_when_it_is_empty():
    d = reopened(PROMPT, weather=Weather(disk_ticks=(3, 3)))
    d.tick(d.submit(1, PROMPT))
    d.run(FlushCache(1, ("l3",)), FlushCache(2, ("l1", "l3")))
    assert [f.token for f in flushes(d)] == [1, 2]
    assert all(f.kept["l3"] == 0 and not f.message for f in flushes(d))
    assert d.seen[1].tokens == greedy(PROMPT, 4)
    d.assert_no_leak()


def test_a_pause_after_failures_lets_the_engine_rest_with_pages_still_listed():
    d = with_disk({}, {}, weather=Weather(durable_fails=1.0))
    for i in range(10):
        d.run(d.submit(i, prompt_of(9, i), max_tokens=1))
    assert d.core.spills.suspended
    assert d.engine.idle
    assert d.engine.pages_pending > 0
    failed = d.core.counters.durable_failed_ops
    d.now += 61.0
    d.run(d.submit(90, prompt_of(9, 90), max_tokens=1))
    assert d.core.counters.durable_failed_ops == failed + 1  # one try
    assert d.engine.idle
    d.run(QueryState(1))
    assert d.engine.state().tiers.spill_suspended
    d.assert_no_leak()


def test_ticks_need_not_hurry_for_writes_alone():
    d = with_disk({}, {}, weather=Weather(disk_ticks=(9, 9)))
    d.tick(d.submit(1, PROMPT, max_tokens=1))
    ops = d.core.state.ops
    tick_until(d, lambda: bool(ops.of(Stream.DURABLE)) and not ops.of(Stream.GATHER))
    d.tick()
    assert not d.engine.computing
    assert not d.engine.idle
    assert d.engine.pause_s == PATIENT_S
    d.run()
    assert d.core.counters.durable == 8


class Recorder:
    """A disk that keeps what it is given and answers 5 to whoever can't wait."""

    us_per_page_read = 0

    def __init__(self) -> None:
        self.got: list[object] = []

    def submit(self, command: object) -> None:
        self.got.append(command)

    def report_now(self, op: int) -> int:
        return 5


def test_disk_commands_go_to_the_disk_whole_and_in_order_and_what_is_seen_is_not_asked_again():
    disk = Recorder()
    workers = TierWorkers(rank=1, num_owners=4, disk=disk)  # type: ignore[arg-type]
    h = (bytes(32),)
    commands = [
        Spill(gather=1, durable=2, first=0, frames=(3,), hashes=h, age=1),
        Lookup(op=3, first=0, hashes=h),
        Reload(op=4, first=0, frames=(1,), hashes=h),
        Drain(op=5, reload=4),
        Touch(first=0, hashes=h, age=1),
        ClearDisk(op=6),
    ]
    workers.submit(commands)
    assert disk.got == commands
    workers.seen[3] = FAILED
    workers.report_now((3, 4))
    assert workers.seen == {3: FAILED, 4: 5}
