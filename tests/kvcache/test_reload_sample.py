"""Reading weighed against computing: what is not begun, what is measured first, and what that costs at most."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.kvcache import CoreConfig, Hold
from benthic.kvcache.commands import DONE, Drain, Lookup, Reload
from benthic.kvcache.reload import SAMPLE_US, Phase
from benthic.kvcache.state import WRITE_THROUGH
from tests.support.core_driver import CoreDriver, branch, prompt

TIMEOUT_US = 1_000_000
SAMPLE = 16


def driver(rates: tuple[int, int], *, owners: int = 1, least: int = 1, sample: int = SAMPLE) -> CoreDriver:
    config = CoreConfig(
        num_owners=owners,
        l1_pages=256,
        l1_free_pages=0,
        l2_frames=256,
        policy=WRITE_THROUGH,
        disk=True,
        staging_frames=32,
        reload_min_pages=least,
        reload_timeout_us=TIMEOUT_US,
        reload_sample_pages=sample,
    )
    d = CoreDriver(config)
    d.rates = rates
    d.tick()
    return d


def asked(d: CoreDriver, hashes: list[bytes], on_disk: int | None = None) -> Hold:
    """A request of which the disk vouches for so many pages, in the tick in which that is known."""
    d.next_id += 1
    held = d.core.hold(d.next_id, hashes, len(hashes))
    assert held is not None
    d.tick()
    lookup = d.last(Lookup)
    d.tick((lookup.op, 1 + (len(lookup.hashes) if on_disk is None else on_disk)))
    return held


def lengths(d: CoreDriver) -> list[int]:
    """Pages of each reload so far."""
    return [len(reload.hashes) for reload in d.given(Reload)]


def test_computing_that_is_about_as_fast_as_reading_is_not_held() -> None:
    """A copy to L1 comes on top of reading: an eighth."""
    d = driver((300, 342))
    assert d.core.hold(1, prompt(1, 20), 20) is None
    d.rates = (300, 343)
    d.tick()
    assert d.core.hold(2, prompt(1, 20), 20) is not None


@pytest.mark.parametrize("owners", [1, 2, 4])
def test_where_the_disks_rate_is_not_known_few_pages_come_first(owners: int) -> None:
    d = driver((0, 1_000), owners=owners)
    held = asked(d, prompt(1, 140))
    sample = d.last(Reload)
    assert (sample.first, len(sample.hashes)) == (0, SAMPLE * owners)
    d.rates = (300, 1_000)
    d.tick((sample.op, 1 + SAMPLE * owners))
    rest = d.last(Reload)
    assert (rest.first, held.phase) == (SAMPLE * owners, Phase.READING)
    assert sample.hashes + rest.hashes == tuple(prompt(1, 140)[: sample.first + SAMPLE * owners + len(rest.hashes)])
    d.tick((rest.op, 1 + len(rest.hashes)))
    assert (held.done, held.landed_first, held.landed_end) == (True, 0, SAMPLE * owners + len(rest.hashes))
    assert lengths(d) == [SAMPLE * owners, 128 * owners - SAMPLE * owners if owners == 1 else 140 - SAMPLE * owners]


def test_a_disk_that_proves_slow_is_read_no_further() -> None:
    d = driver((0, 1_310))
    held = asked(d, prompt(1, 100))
    d.rates = (1_930, 1_310)
    d.tick((d.last(Reload).op, 1 + SAMPLE))
    assert (held.done, held.landed_end, lengths(d)) == (True, SAMPLE, [SAMPLE])
    run = d.open(prompt(1, 100))
    d.core.release(held)
    assert run.num_cached == SAMPLE, "what was read is used"
    d.close(run)
    d.settle()
    assert d.core.reloads.held_frames == [0]


@pytest.mark.parametrize(("rates", "pages"), [((0, 0), 100), ((100, 0), 100), ((100, 900), 100), ((0, 900), 31)])
def test_what_is_known_or_short_or_can_not_be_weighed_is_read_at_once(rates: tuple[int, int], pages: int) -> None:
    d = driver(rates)
    asked(d, prompt(1, pages))
    assert lengths(d) == [pages]


def test_a_sample_has_the_least_pages_that_are_worth_a_reload() -> None:
    d = driver((0, 900), least=20)
    asked(d, prompt(1, 100))
    assert lengths(d) == [20]


def test_where_the_rate_stays_unknown_the_rest_is_read_and_no_second_sample() -> None:
    d = driver((0, 900))
    held = asked(d, prompt(1, 100))
    d.tick((d.last(Reload).op, 1 + SAMPLE))
    d.tick((d.last(Reload).op, 1 + 100 - SAMPLE))
    assert (held.done, held.landed_end, lengths(d)) == (True, 100, [SAMPLE, 100 - SAMPLE])


@pytest.mark.parametrize("good", [0, 5, SAMPLE - 1])
def test_behind_a_bad_page_of_the_sample_nothing_is_read(good: int) -> None:
    d = driver((0, 900))
    held = asked(d, prompt(1, 100))
    d.rates = (100, 900)
    d.tick((d.last(Reload).op, 1 + good))
    assert (held.done, held.landed_end, lengths(d), d.core.in_flight) == (True, good, [SAMPLE], 0)


@pytest.mark.parametrize(("compute_us", "most_us"), [(900, SAMPLE_US), (40_000, 100 * 40_000 // 8)])
def test_a_sample_is_bounded_in_time_by_what_computing_takes(compute_us: int, most_us: int) -> None:
    d = driver((0, compute_us))
    held = asked(d, prompt(1, 100))
    op = d.last(Reload).op
    assert d.core.overdue(d.now_us + most_us) == ()
    assert d.core.overdue(d.now_us + most_us + 1) == (op,)
    d.tick((op, 1 + 3), us=most_us + 1)
    assert (held.done, held.landed_end, lengths(d)) == (True, 3, [SAMPLE])
    d.tick((d.last(Drain).op, DONE))
    assert d.core.reloads.held_frames == [3]
    assert d.core.counters.reload_timeouts == 1


def test_a_sample_that_is_whole_in_the_last_moment_is_too_slow_unless_the_rate_is_there() -> None:
    for rate, parts in ((0, [SAMPLE]), (100, [SAMPLE, 100 - SAMPLE])):
        d = driver((0, 900))
        asked(d, prompt(1, 100))
        d.rates = (rate, 900)
        d.tick((d.last(Reload).op, 1 + SAMPLE), us=SAMPLE_US + 1)
        assert lengths(d) == parts


def test_what_anothers_reload_has_measured_counts_after_the_look_up_too() -> None:
    d = driver((0, 900))
    first = asked(d, prompt(1, 31))
    d.next_id += 1
    second = d.core.hold(d.next_id, prompt(2, 100), 100)
    assert second is not None
    d.tick()
    d.rates = (950, 900)
    d.tick((d.last(Reload).op, 1 + 31), (d.last(Lookup).op, 1 + 100))
    assert (first.landed_end, second.done, second.landed_end, lengths(d)) == (31, True, 0, [31])


@pytest.mark.parametrize("read_us", [100, 950])
def test_who_follows_a_sample_decides_alike(read_us: int) -> None:
    d = driver((0, 900))
    held = asked(d, prompt(1, 100))
    follower = d.core.hold(99, branch(1, 60, 100), 100)
    assert follower is not None
    d.tick()
    assert follower.phase is Phase.FOLLOWING
    d.rates = (read_us, 900)
    d.tick((d.last(Reload).op, 1 + SAMPLE))
    if read_us > 900:
        assert (held.done, follower.done, follower.landed_end) == (True, True, SAMPLE)
    else:
        assert (held.phase, follower.phase) == (Phase.READING, Phase.FOLLOWING)
        d.tick((d.last(Reload).op, 1 + 100 - SAMPLE))
        assert (held.landed_end, follower.landed_end) == (100, 60)


def test_one_that_is_gone_during_its_sample_reads_no_further() -> None:
    d = driver((0, 900))
    held = asked(d, prompt(1, 100))
    d.core.release(held)
    d.rates = (100, 900)
    d.tick((d.last(Reload).op, 1 + SAMPLE))
    assert (lengths(d), d.found(prompt(1, 100)), d.core.reloads.held_frames) == ([SAMPLE], (0, SAMPLE), [0])


rates_us = st.integers(1, 3_000)


def parts_us(reads: Sequence[int], read_us: int, compute_us: int, num_pages: int) -> int:
    """What a request takes that reads so many pages and computes the rest."""
    return sum(reads) * read_us + (num_pages - sum(reads)) * compute_us


@settings(deadline=None)
@given(rates_us, rates_us, st.integers(32, 128), st.integers(1, 16))
def test_the_choice_costs_at_most_the_sample_more_than_the_better_of_the_two(
    read_us: int, compute_us: int, num_pages: int, sample: int
) -> None:
    d = driver((0, compute_us), sample=sample)
    held = asked(d, prompt(1, num_pages))
    while not held.done:
        reload = d.last(Reload)
        d.rates = (read_us, compute_us)
        d.tick((reload.op, 1 + len(reload.hashes)))
    reads = lengths(d)
    assert held.landed_end == sum(reads)
    took = parts_us(reads, read_us, compute_us, num_pages)
    assert took <= num_pages * compute_us + sample * max(0, read_us - compute_us), "later than computing"
    if 8 * read_us <= 7 * compute_us:
        assert reads == [sample, num_pages - sample]
    else:
        assert reads == [sample]
