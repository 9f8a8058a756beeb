"""A disk that fails, fills up or hangs under the store: misses and counters, never a wrong byte or a lost answer."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benthic.kvcache.commands import DONE, FAILED, Lookup, Spill
from benthic.tiers.disk.retire import ERRORS_IN_A_ROW, TRY_AGAIN_S
from benthic.tiers.disk.stats import LOG_PERIOD_S
from tests.support.disk_store import GEOMETRY, Driver, config_for, page_hash
from tests.support.faulty_disk import Call, Fault, FaultyDisk, error, fail, hang


def _healthy(call: Call) -> None:
    return None


def _slab(tmp_path: Path) -> Path:
    return next(tmp_path.rglob("slab-0.dat"))


def _slot_of(driver: Driver, page: int) -> int:
    return driver.floor.live[page_hash(page)].slot


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.001)


class _Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@contextmanager
def _driver(tmp_path: Path, disk: FaultyDisk, slots: int = 100, **options: object) -> Iterator[Driver]:
    driver = Driver(config_for(tmp_path, slots), io=disk, **options)  # type: ignore[arg-type]  # of the right types
    try:
        yield driver
    finally:
        disk.fault = _healthy
        driver.close()


@pytest.mark.parametrize(
    ("offset", "kind"),
    [
        (0, "foreign"),  # magic
        (12, "torn"),  # length, caught by the header's own checksum
        (20, "torn"),  # hash
        (50, "torn"),  # checksum of the payload
        (60, "torn"),  # checksum of the header
        (4096, "checksum"),
        (4096 + 7999, "checksum"),
    ],
)
def test_a_flipped_bit_is_a_miss_and_the_page_is_forgotten(tmp_path: Path, offset: int, kind: str) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    driver.spill(range(6))
    _flip(_slab(tmp_path), _slot_of(driver, 3) * GEOMETRY.slot_bytes + offset)
    assert driver.reload(range(6), frame=20) == 3
    assert driver.lookup(range(6)) == 3  # off the map before the failure is reported
    stats = driver.store.stats()
    assert stats.read_failures[kind] == sum(stats.read_failures.values()) == 1
    assert stats.slots_retired == 0
    driver.close()
    driver = Driver(config)
    assert driver.lookup(range(6)) == 3  # and off the index
    assert driver.spill(range(6)) == DONE
    assert driver.reload(range(6), frame=20) == 6
    driver.close()


def test_padding_behind_the_payload_is_nobodys_business(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100))
    driver.spill(range(2))
    _flip(_slab(tmp_path), _slot_of(driver, 0) * GEOMETRY.slot_bytes + 4096 + 8100)
    assert driver.reload(range(2), frame=20) == 2
    driver.close()


def test_headers_are_checked_behind_the_start(tmp_path: Path) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    driver.spill(range(20))
    slots = {page: _slot_of(driver, page) for page in range(20)}
    driver.close()
    for page in (4, 11):
        _flip(_slab(tmp_path), slots[page] * GEOMETRY.slot_bytes + 16)
    driver = Driver(config)
    _wait_until(lambda: driver.store.stats().read_failures["torn"] == 2)
    assert driver.held(range(20)) == set(range(20)) - {4, 11}
    driver.close()


def test_another_page_in_the_slot_is_a_miss(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100))
    driver.spill(range(2))
    size = GEOMETRY.slot_bytes
    one, other = _slot_of(driver, 0) * size, _slot_of(driver, 1) * size
    with _slab(tmp_path).open("r+b") as file:
        file.seek(other)
        whole = file.read(size)
        file.seek(one)
        file.write(whole)
    assert driver.reload([0], frame=20) == 0
    assert driver.store.stats().read_failures["foreign"] == 1
    assert driver.reload([1], frame=20) == 1
    driver.close()


@pytest.mark.parametrize("damage", ["zeroed", "truncated", "flipped"])
def test_a_damaged_index_costs_pages_and_nothing_else(tmp_path: Path, damage: str) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    driver.spill(range(40))
    driver.close()
    index = next(tmp_path.rglob("index-0.lmdb"))
    content = bytearray(index.read_bytes())
    if damage == "zeroed":
        content[:] = bytes(len(content))
    elif damage == "truncated":
        del content[len(content) // 2 :]
    else:
        for offset in range(100, len(content), 997):
            content[offset] ^= 4
    index.write_bytes(content)
    driver = Driver(config)
    for page in driver.held(range(40)):
        driver.reload([page], frame=20)  # compares what it gets
    assert driver.spill(range(40)) == DONE
    assert driver.reload(range(40), frame=50) == 40
    driver.close()


def test_a_slab_cut_short_while_serving_gives_misses_and_retires_slots(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100))
    driver.spill(range(10))
    behind = [page for page in range(10) if _slot_of(driver, page) >= 5]
    os.truncate(_slab(tmp_path), 5 * GEOMETRY.slot_bytes)
    for page in range(10):
        assert driver.reload([page], frame=20) == (0 if page in behind else 1)
    stats = driver.store.stats()
    assert stats.read_failures["io"] == stats.slots_retired == len(behind) == 5
    driver.close()


def test_a_slab_cut_short_before_the_start_gives_misses(tmp_path: Path) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    driver.spill(range(10))
    driver.close()
    os.truncate(_slab(tmp_path), 5 * GEOMETRY.slot_bytes)
    driver = Driver(config)
    came = sum(driver.reload([page], frame=20) for page in range(10))
    assert came == 5
    assert driver.spill(range(10)) == DONE
    assert driver.reload(range(10), frame=20) == 10
    driver.close()


def test_a_failed_sync_fails_all_that_was_written_by_then(tmp_path: Path) -> None:
    disk, go_on, writes = FaultyDisk(), threading.Event(), []
    syncs = iter([error(errno.EIO)])

    def fault(call: Call) -> OSError | None:
        if call.name == "pwritev" and call.path.name == "slab-0.dat":
            writes.append(call.offset)
        if call.name == "fdatasync" and call.path.name == "slab-0.dat" and (found := next(syncs, None)):
            go_on.wait(30)
            return found
        return None

    with _driver(tmp_path, disk) as driver:
        disk.fault = fault
        first = driver.begin_spill(range(4))
        _wait_until(lambda: len(writes) == 4)
        second = driver.begin_spill(range(10, 14))  # written while the sync of the first is under way
        _wait_until(lambda: len(writes) == 8)
        go_on.set()
        assert driver.wait([first[1], second[1]]) == [FAILED, FAILED]  # though the next sync would have succeeded
        assert driver.held(range(20)) == set()
        assert driver.spill(range(10, 14)) == DONE
        assert driver.store.stats().slots_used == 4
        assert driver.reload(range(10, 14), frame=50) == 4


@pytest.mark.parametrize(
    ("call", "number", "retired"),
    [
        ("pwritev", errno.ENOSPC, 0),
        ("pwritev", errno.EIO, 4),
        ("pwritev", errno.EROFS, 0),
        ("fdatasync", errno.EIO, 0),
        ("fdatasync", errno.ENOSPC, 0),
        ("before_commit", errno.ENOSPC, 0),
        ("before_commit", errno.EIO, 0),
        ("before_commit", errno.EROFS, 0),
    ],
)
def test_a_failed_write_fails_softly_and_leaves_nothing(tmp_path: Path, call: str, number: int, retired: int) -> None:
    disk = FaultyDisk()
    with _driver(tmp_path, disk) as driver:
        assert driver.spill(range(8)) == DONE
        disk.fault = fail(call, number)
        assert driver.spill(range(20, 24)) == FAILED
        disk.fault = _healthy
        assert driver.held(range(20, 24)) == set()
        stats = driver.store.stats()
        assert stats.write_errors >= 1
        assert errno.errorcode[number] in stats.last_error
        assert str(_slab(tmp_path)) in stats.last_error
        assert stats.out_of_service == ""
        assert driver.spill(range(20, 24)) == DONE
        stats = driver.store.stats()
        assert (stats.slots_used, stats.slots_retired, stats.staging_used) == (12, retired, 0)
        assert driver.reload([*range(8), *range(20, 24)], frame=50) == 12
    driver = Driver(config_for(tmp_path, 100))
    assert driver.held(range(30)) == {*range(8), *range(20, 24)}
    driver.close()


@pytest.mark.parametrize("call", ["pwritev", "before_commit"])
def test_a_full_disk_goes_out_of_service_says_how_to_get_it_back_and_comes_back(tmp_path: Path, call: str) -> None:
    disk, clock = FaultyDisk(), _Clock()
    with _driver(tmp_path, disk, clock=clock) as driver:
        driver.spill(range(4))
        disk.fault = fail(call, errno.ENOSPC)
        for attempt in range(ERRORS_IN_A_ROW):
            assert driver.spill([100 + attempt]) == FAILED
        reason = driver.store.stats().out_of_service
        assert "ENOSPC" in reason
        assert "make room" in reason
        asked = disk.calls[call]
        assert driver.spill(range(200, 210)) == FAILED
        assert disk.calls[call] == asked  # at once, without trying
        assert driver.reload(range(4), frame=20) == 4  # reads go on
        assert driver.spill(range(4)) == DONE  # what is there is acknowledged
        disk.fault = _healthy
        assert driver.spill([300]) == FAILED
        clock.ahead += TRY_AGAIN_S
        assert driver.spill([300]) == DONE
        assert driver.store.stats().out_of_service == ""
        assert driver.spill(range(200, 210)) == DONE


def test_a_failing_disk_stays_out_of_service_and_reads_go_on(tmp_path: Path) -> None:
    disk, clock = FaultyDisk(), _Clock()
    with _driver(tmp_path, disk, clock=clock) as driver:
        driver.spill(range(4))
        disk.fault = fail("pwritev", errno.EIO)
        assert driver.spill(range(100, 100 + ERRORS_IN_A_ROW)) == FAILED
        disk.fault = _healthy
        clock.ahead += 100 * TRY_AGAIN_S
        assert driver.spill([300]) == FAILED
        assert "restart" in driver.store.stats().out_of_service
        assert driver.reload(range(4), frame=20) == 4
        assert driver.lookup(range(5)) == 4


def test_a_page_that_cannot_be_read_is_dropped_and_its_slot_not_used_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with _driver(tmp_path, disk, slots=20) as driver:
        driver.spill(range(6))
        bad = _slot_of(driver, 2)
        broken: Fault = lambda call: (  # noqa: E731  a sector that fails for good
            error(errno.EIO)
            if call.name in ("preadv", "pwritev") and call.offset // GEOMETRY.slot_bytes == bad
            else None
        )
        disk.fault = broken
        assert driver.reload(range(6), frame=20) == 2
        stats = driver.store.stats()
        assert stats.read_failures["io"] == 1
        assert driver.lookup(range(6)) == 2
        for start in range(100, 160, 4):  # round the pool several times: the bad slot is never met
            assert driver.spill(range(start, start + 4)) == DONE
        stats = driver.store.stats()
        assert (stats.slots_retired, stats.write_errors) == (1, 0)


def test_errors_are_said_once_a_period_with_their_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = FaultyDisk(), _Clock()
    with _driver(tmp_path, disk, clock=clock) as driver:
        disk.fault = fail("fdatasync", errno.EIO)
        caplog.set_level(logging.WARNING)
        for page in range(4):
            assert driver.spill([page]) == FAILED
        assert [r.message for r in caplog.records if "EIO" in r.message] == [
            f"{_slab(tmp_path)}: sync of the slab: EIO (Input/output error)"
        ]
        clock.ahead += LOG_PERIOD_S
        assert driver.spill([9]) == FAILED
        assert "3 more of the kind" in caplog.records[-1].message
        assert driver.store.stats().write_errors == 5


@pytest.mark.parametrize("size", [4096, 8192])
def test_short_transfers_are_carried_on(tmp_path: Path, size: int) -> None:
    disk = FaultyDisk()
    with _driver(tmp_path, disk) as driver:
        disk.fault = lambda call: size if call.name in ("pwritev", "preadv") else None
        assert driver.spill(range(10)) == DONE
        assert driver.reload(range(10), frame=20) == 10
        assert disk.calls["pwritev"] >= 20


def test_a_read_that_hangs_is_answered_at_the_deadline_and_lands_in_its_own_frames(tmp_path: Path) -> None:
    disk, go_on = FaultyDisk(), threading.Event()
    with _driver(tmp_path, disk, num_frames=300) as driver:
        driver.spill(range(40))
        disk.fault = hang("preadv", go_on, path="slab-0.dat")
        reload = driver.begin_reload(range(40), frame=100)
        other = driver.begin_reload(range(20, 40), frame=200)
        _wait_until(lambda: disk.calls.get("preadv", 0) >= 4)
        assert driver.lookup(range(45)) == 40  # nobody else waits
        assert driver.spill(range(50, 60)) == DONE
        assert driver.store.report_now(reload) == 1
        assert driver.store.report_now(other) == 1
        drains = [driver.drain(reload), driver.drain(other)]
        time.sleep(0.05)
        assert not set(drains) & set(driver.poll())
        assert driver.store.stats().read_queue == 0  # what had not begun never does
        go_on.set()
        assert driver.wait(drains) == [DONE, DONE]
        landed = [i for i in range(300) if driver.frames.frame(i)[:8000] != bytes(8000) and i >= 60]
        assert landed
        assert all(driver.frames.holds(i, i - 100) if i < 140 else driver.frames.holds(i, i - 180) for i in landed)
        assert len(landed) == 4  # one a reader
        assert driver.reload(range(40), frame=100) == 40


def test_a_reload_at_its_deadline_counts_what_is_verified(tmp_path: Path) -> None:
    disk, go_on = FaultyDisk(), threading.Event()
    with _driver(tmp_path, disk) as driver:
        driver.spill(range(20))
        slow = _slot_of(driver, 13)
        disk.fault = lambda call: (
            hang("preadv", go_on)(call) if call.offset // GEOMETRY.slot_bytes == slow else None  # type: ignore[func-returns-value]
        )
        reload = driver.begin_reload(range(20), frame=30)
        _wait_until(lambda: driver.store.stats().reloaded_pages == 19)
        assert reload not in driver.poll()
        assert driver.store.report_now(reload) == 1 + 13
        drain = driver.drain(reload)
        go_on.set()
        assert driver.wait([drain]) == [DONE]


def test_a_lookup_that_the_keeper_cannot_answer_vouches_for_nothing(tmp_path: Path) -> None:
    disk, go_on = FaultyDisk(), threading.Event()
    with _driver(tmp_path, disk, rank=1, num_ranks=2, num_owners=2) as driver:
        driver.spill(range(10))
        disk.fault = hang("before_commit", go_on)
        ops = driver.begin_spill(range(20, 30))
        _wait_until(lambda: disk.calls["before_commit"] >= 2)
        lookup = driver.op()
        driver.store.submit(Lookup(op=lookup, first=0, hashes=tuple(map(page_hash, range(10)))))
        time.sleep(0.05)
        assert lookup not in driver.poll()
        assert driver.store.report_now(lookup) == 1 + 1  # its first own position
        go_on.set()
        assert driver.wait(ops) == [DONE, DONE]
        assert lookup not in driver.poll()


def test_closing_under_a_write_that_hangs_takes_its_time_and_no_more(tmp_path: Path) -> None:
    disk, go_on = FaultyDisk(), threading.Event()
    driver = Driver(config_for(tmp_path, 100), io=disk)
    driver.spill(range(10))
    disk.fault = hang("pwritev", go_on, path="slab-0.dat")
    driver.begin_spill(range(20, 30))
    began = time.monotonic()
    driver.store.close(0.2)
    assert time.monotonic() - began < 20  # the hang would last for ever
    driver = Driver(config_for(tmp_path, 100))
    held = driver.held(range(30))
    assert held >= set(range(10))
    for page in held:
        assert driver.reload([page], frame=40) == 1
    driver.close()
    go_on.set()


def test_a_frame_source_that_fails_fails_both_operations(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100))
    gather, durable = driver.op(), driver.op()
    frames = (0, driver.frames.count + 5)
    driver.store.submit(
        Spill(gather=gather, durable=durable, first=0, frames=frames, hashes=(page_hash(0), page_hash(1)), age=1)
    )
    assert driver.wait([gather, durable]) == [FAILED, FAILED]
    assert driver.spill(range(5)) == DONE
    driver.close()


def test_a_bug_in_the_keeper_ends_the_floor_and_not_the_answers(tmp_path: Path) -> None:
    disk = FaultyDisk()

    def bug(call: Call) -> None:
        if call.name == "before_commit":
            raise RuntimeError("a bug")

    with _driver(tmp_path, disk) as driver:
        driver.spill(range(10))
        disk.fault = bug
        assert driver.spill(range(20, 30)) == FAILED
        disk.fault = _healthy
        assert "a bug" in driver.store.stats().out_of_service
        assert driver.spill(range(40, 50)) == FAILED
        assert driver.lookup(range(10)) == 0
        assert driver.reload(range(10), frame=20) == 0
        assert driver.clear() == DONE
    driver = Driver(config_for(tmp_path, 100))
    assert driver.held(range(50)) == set(range(10))
    driver.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "preadv"])
def test_a_bug_in_a_worker_is_a_failed_operation(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()

    def bug(asked: Call) -> None:
        if asked.name == call:
            raise RuntimeError("a bug")

    with _driver(tmp_path, disk) as driver:
        driver.spill(range(10))
        disk.fault = bug
        if call == "preadv":
            assert driver.reload(range(10), frame=20) == 0
        else:
            assert driver.spill(range(20, 30)) == FAILED
        assert "a bug" in driver.store.stats().last_error
        disk.fault = _healthy
        assert driver.reload([5], frame=20) == 1
