"""The simulated workers report as the contract of the commands says."""

from benthic.kvcache.commands import DONE, FAILED, Backup, Drain, LoadBack, Lookup, Reload, Spill, Touch
from benthic.simulation.setup import Setup
from benthic.simulation.workers import DISK_LATENCY_US, LOOKUP_US, Workers

MS = 1000
# a page takes 1 ms over the link and 10 ms to or from the disk
SETUP = Setup(page_bytes=10_000_000, copy_gb_per_s=10, disk_gb_per_s=1)


def hashes(*ids: int) -> tuple[bytes, ...]:
    return tuple(i.to_bytes(32, "big") for i in ids)


def spilled(workers: Workers, ids: tuple[int, ...], age: int = 1) -> int:
    """Have the pages written at once, from position 0; gives what the durable operation reports."""
    workers.submit([Spill(gather=901, durable=902, first=0, frames=ids, hashes=hashes(*ids), age=age)], 0)
    for _ in range(2):
        end = workers.next_us()
        assert end is not None
        workers.advance(end)
    assert workers.seen.pop(901) == DONE
    return workers.seen.pop(902)


def test_copies_take_their_time() -> None:
    workers = Workers(SETUP)
    workers.submit(
        [Backup(op=1, first=0, pages=(0, 1), frames=(0, 1)), LoadBack(op=2, first=0, frames=(3,), pages=(4,))], 0
    )
    assert workers.next_us() == MS
    workers.advance(MS)
    assert workers.seen == {2: DONE}
    workers.advance(2 * MS)
    assert workers.seen == {1: DONE, 2: DONE}


def test_lanes_work_side_by_side() -> None:
    workers = Workers(Setup(page_bytes=10_000_000, copy_gb_per_s=10, owners=4))
    workers.submit([Backup(op=1, first=0, pages=(0,) * 5, frames=(0,) * 5)], 0)
    assert workers.next_us() == 2 * MS


def test_a_spill_is_gathered_then_durable_and_a_lookup_finds_its_head() -> None:
    workers = Workers(SETUP)
    workers.submit([Spill(gather=1, durable=2, first=3, frames=(0, 1), hashes=hashes(7, 8), age=1)], 0)
    workers.advance(2 * MS)
    assert workers.seen == {1: DONE}
    workers.advance(22 * MS + DISK_LATENCY_US)
    assert workers.seen == {1: DONE, 2: DONE}
    workers.submit([Lookup(op=3, first=3, hashes=hashes(7, 8, 9)), Lookup(op=4, first=3, hashes=hashes(9, 7))], 50 * MS)
    workers.advance(50 * MS + 2 * LOOKUP_US)
    assert (workers.seen[3], workers.seen[4]) == (1 + 2, 1 + 0)


def test_a_spill_without_room_fails() -> None:
    workers = Workers(Setup(page_bytes=10_000_000, l3_pages=2))
    assert spilled(workers, (1, 2, 3)) == FAILED
    assert workers.floor is not None
    assert workers.floor.num_pages == 0


def test_a_reload_gives_what_is_still_there() -> None:
    workers = Workers(Setup(page_bytes=10_000_000, disk_gb_per_s=1, l3_pages=4))
    assert spilled(workers, (1, 2, 3)) == DONE
    workers.submit([Reload(op=1, first=0, frames=(0, 1, 2), hashes=hashes(1, 2, 3))], 0)
    assert workers.floor is not None
    workers.floor.write(hashes(9), 0, 2)  # collects the tail of what is being read
    workers.advance(30 * MS + DISK_LATENCY_US)
    assert workers.seen == {1: 1 + 2}


def test_a_touch_keeps_pages_young() -> None:
    workers = Workers(Setup(page_bytes=10_000_000, l3_pages=4))
    assert spilled(workers, (1,)) == DONE
    assert spilled(workers, (2,), age=2) == DONE
    workers.submit([Touch(first=0, hashes=hashes(1, 5), age=3)], 0)
    assert spilled(workers, (3, 4), age=4) == DONE
    assert workers.floor is not None
    assert workers.floor.num_leading(hashes(1), 0) == 1
    assert workers.floor.num_leading(hashes(2), 0) == 0


def test_past_its_deadline_a_reload_reports_what_it_has_and_drains() -> None:
    workers = Workers(SETUP)
    assert spilled(workers, (1, 2, 3, 4)) == DONE
    start = 100 * MS - DISK_LATENCY_US
    reload = Reload(op=1, first=0, frames=(0, 1, 2, 3), hashes=hashes(1, 2, 3, 4))
    workers.submit([reload, Reload(op=2, first=0, frames=(4,), hashes=hashes(1))], start)
    workers.report_now((1, 2), 125 * MS)
    assert workers.seen == {1: 1 + 2, 2: 1 + 0}
    workers.submit([Drain(op=3, reload=1), Drain(op=4, reload=2)], 125 * MS)
    assert workers.seen == {1: 3, 2: 1, 4: DONE}  # the second had not begun
    workers.advance(130 * MS)
    assert workers.seen[3] == DONE
    assert workers.next_us() is None


def test_past_its_deadline_a_lookup_vouches_for_nothing() -> None:
    workers = Workers(SETUP)
    workers.submit([Lookup(op=1, first=0, hashes=hashes(1))], 0)
    workers.report_now((1,), 10)
    assert workers.seen.pop(1) == 1
    workers.advance(LOOKUP_US)
    assert workers.seen == {}


def test_what_has_reported_is_not_asked_again() -> None:
    workers = Workers(SETUP)
    workers.submit([Lookup(op=1, first=0, hashes=())], 0)
    workers.advance(LOOKUP_US)
    workers.report_now((1,), LOOKUP_US)
    assert workers.seen == {1: 1}
