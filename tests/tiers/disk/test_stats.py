"""Counters and the log that repeats itself at most once a period."""

import errno
import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.tiers.disk.format import Verdict
from benthic.tiers.disk.stats import (
    LEAST_PAGES,
    LOG_PERIOD_S,
    RATE_HOLDS_S,
    READ_FAULTS,
    Counts,
    ErrorLog,
    read_fault,
)


def test_every_verdict_but_ok_has_a_kind_that_is_counted() -> None:
    kinds = {read_fault(verdict) for verdict in Verdict if verdict is not Verdict.OK}
    assert kinds | {read_fault(OSError()), "overtaken"} == set(READ_FAULTS)


def test_overlapping_reads_cost_the_time_between_their_ends() -> None:
    now = [0.0]
    counts = Counts(lambda: now[0])
    assert counts.us_per_page_read == 0
    for _ in range(400):  # four at a time, each 4 ms long
        now[0] += 0.001
        counts.page_read(4096, now[0] - 0.004)
    assert counts.us_per_page_read == pytest.approx(1000, rel=0.02)
    now[0] += RATE_HOLDS_S / 2  # an idle time is nobody's cost
    counts.page_read(4096, now[0] - 0.001)
    assert counts.us_per_page_read == pytest.approx(1000, rel=0.02)
    assert counts["reloaded_pages"] == 401


def read_at(counts: Counts, now: list[float], began_s: float, ends_s: Sequence[float]) -> None:
    """Pages whose reads begin together, in so many slots of the queue, and end then."""
    for end_s in ends_s:
        now[0] = end_s
        counts.page_read(4096, began_s)


@given(
    st.integers(1, 16),
    st.integers(LEAST_PAGES, 32),
    st.floats(1e-4, 1e-1),
    st.floats(0.0, 1e-2),
    st.booleans(),
)
def test_a_sample_gives_the_time_a_page_not_the_latency_of_the_first(
    depth: int, num_pages: int, page_s: float, latency_s: float, together: bool
) -> None:
    """Reads at a depth on a disk of a fixed rate, which serves them in turns or side by side."""
    now = [5.0]
    counts = Counts(lambda: now[0])
    ends = [5.0 + latency_s + (i + 1) * page_s for i in range(num_pages)]
    if together:
        ends = [ends[min(i // depth * depth + depth, num_pages) - 1] for i in range(num_pages)]
    for i, end in enumerate(ends):
        began = 5.0 if i < depth else ends[i - depth]
        read_at(counts, now, began, [end])
    assert counts.us_per_page_read == pytest.approx((page_s + latency_s / num_pages) * 1e6, rel=0.01, abs=1)


def test_few_pages_tell_nothing() -> None:
    now = [5.0]
    counts = Counts(lambda: now[0])
    read_at(counts, now, 5.0, [5.008] * (LEAST_PAGES - 1))
    assert counts.us_per_page_read == 0
    read_at(counts, now, 5.0, [5.008])
    assert counts.us_per_page_read == 1000


def test_a_rate_is_forgotten_and_measured_anew() -> None:
    now = [5.0]
    counts = Counts(lambda: now[0])
    read_at(counts, now, 5.0, [5.0 + i for i in range(1, 30)])
    assert counts.us_per_page_read == 1_000_000
    now[0] += RATE_HOLDS_S
    assert counts.us_per_page_read == 0
    began = now[0]
    read_at(counts, now, began, [began + 0.001 * (i + 1) for i in range(LEAST_PAGES)])
    assert counts.us_per_page_read == pytest.approx(1000, abs=1)


def test_after_the_first_pages_the_newest_has_a_part_of_32() -> None:
    now = [5.0]
    counts = Counts(lambda: now[0])
    read_at(counts, now, 5.0, [5.0 + 0.001 * (i + 1) for i in range(320)])
    read_at(counts, now, now[0], [now[0] + 0.033])
    assert counts.us_per_page_read == pytest.approx(2000, abs=2)


def test_an_error_is_said_once_a_period_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    counts = Counts(lambda: now[0])
    log = ErrorLog("/d/slab-0.dat", counts, lambda: now[0])
    error = OSError(errno.EIO, "Input/output error")
    with caplog.at_level(logging.WARNING):
        for slot in range(5):
            log.say(f"write of slot {slot}", error)
        log.say("read of slot 9", "bad payload")
        now[0] = LOG_PERIOD_S
        log.say("write of slot 5", error)
    assert [record.message for record in caplog.records] == [
        "/d/slab-0.dat: write of slot 0: EIO (Input/output error)",
        "/d/slab-0.dat: read of slot 9: bad payload",
        "/d/slab-0.dat: write of slot 5: EIO (Input/output error) (and 4 more of the kind since the last message)",
    ]
    assert counts.last_error == "/d/slab-0.dat: write of slot 5: EIO (Input/output error)"
