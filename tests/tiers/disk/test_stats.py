"""Counters and the log that repeats itself at most once a period."""

import errno
import logging

import pytest

from benthic.tiers.disk.format import Verdict
from benthic.tiers.disk.stats import LOG_PERIOD_S, READ_FAULTS, Counts, ErrorLog, read_fault


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
    now[0] += 1000.0  # an idle time is nobody's cost
    counts.page_read(4096, now[0] - 0.001)
    assert counts.us_per_page_read == pytest.approx(1000, rel=0.02)
    assert counts["reloaded_pages"] == 401


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
