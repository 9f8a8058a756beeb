"""The order of writes, tried by loading every state that a power cut may leave: no wrong byte, no slot with two owners,
and everything that was acknowledged is there. A kill alone would not show it: it loses no page cache."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benthic.tiers.disk.floor import RankFloor
from benthic.tiers.disk.index import Entry
from benthic.tiers.disk.io import IndexCommit
from tests.support.disk_floor import NoSync, config_for, open_one, page_hash, readable, store, write_page
from tests.support.faulty_disk import Event, State, TracingDisk, build_state, power_cuts, snapshot

NUM = 12
BUDGET = 400 * 1024  # about 20 slots


def spill(floor: RankFloor, io: TracingDisk, number: int) -> None:
    store(floor, [number])
    io.mark(("durable", number))


def collect(floor: RankFloor, io: TracingDisk, number: int) -> None:
    io.mark(("leaving", number))
    entry = floor.live.pop(page_hash(number))
    floor.index.apply([], [page_hash(number)])
    floor.pool.give(entry.slot)


def busy(floor: RankFloor, io: TracingDisk) -> None:
    """Spills, then each collected page's slot is used by the next."""
    for number in range(NUM):
        spill(floor, io, number)
    for number in range(NUM):
        collect(floor, io, number)
        spill(floor, io, NUM + number)
    for number in range(NUM, NUM + 3):
        floor.live[page_hash(number)] = Entry(floor.live[page_hash(number)].slot, number, 999)
        floor.index.apply([(page_hash(number), floor.live[page_hash(number)])], [])


def promised(marks: Sequence[object]) -> set[int]:
    """Pages that were acknowledged as durable and that nobody has begun to collect."""
    pages: set[int] = set()
    for mark in marks:
        assert isinstance(mark, tuple)
        if mark[0] == "durable":
            pages.add(mark[1])
        else:
            pages.discard(mark[1])
    return pages


def check_state(state: State, old: Path, new: Path, *, ready: bool) -> None:
    build_state(state, old, new)
    floor = open_one(config_for(new, BUDGET), io=NoSync())
    slots = [entry.slot for entry in floor.live.values()]
    assert len(slots) == len(set(slots)), "a slot with two owners"
    floor.pool.check()
    found = readable(floor, range(2 * NUM))  # compares the bytes of what passes for whole
    if ready:
        assert promised(state.marks) <= set(found)
    floor.close()


def record(folder: Path, act: Callable[[RankFloor, TracingDisk], None]) -> list[Event]:
    """The trace of a first start and `act`."""
    io = TracingDisk(NoSync())
    floor = open_one(config_for(folder, BUDGET), io=io)
    act(floor, io)
    floor.close()
    return io.trace


def behind_probe(trace: Sequence[Event]) -> int:
    """Where the start has done with measuring the disk: before that there's nothing to lose."""
    return next(n for n, event in enumerate(trace) if event.kind == "unlink" and event.path.name == "probe")


def test_every_cut_leaves_a_floor_that_keeps_its_word(memory_path: Path) -> None:
    trace = record(memory_path / "old", busy)
    for number, state in enumerate(power_cuts(trace, random.Random(1), first=behind_probe(trace), per_point=1)):
        check_state(state, memory_path / "old", memory_path / str(number), ready=True)
    assert number > 200


def broken_no_sync(floor: RankFloor, io: TracingDisk) -> None:
    for number in range(6):
        slot = floor.pool.take()
        assert slot is not None
        write_page(floor.slab, slot, number)
        floor.index.apply([(page_hash(number), Entry(slot, number, 0))], [])
        io.mark(("durable", number))


def broken_early_index(floor: RankFloor, io: TracingDisk) -> None:
    for number in range(6):
        slot = floor.pool.take()
        assert slot is not None
        floor.index.apply([(page_hash(number), Entry(slot, number, 0))], [])
        io.mark(("durable", number))
        write_page(floor.slab, slot, number)
        floor.slab.sync()


@pytest.mark.parametrize("act", [broken_no_sync, broken_early_index])
def test_a_wrong_order_would_be_found(memory_path: Path, act: Callable[[RankFloor, TracingDisk], None]) -> None:
    trace = record(memory_path / "old", act)
    broken = 0
    for number, state in enumerate(power_cuts(trace, random.Random(1), first=behind_probe(trace), per_point=1)):
        build_state(state, memory_path / "old", memory_path / str(number))
        floor = open_one(config_for(memory_path / str(number), BUDGET), io=NoSync())
        broken += not promised(state.marks) <= set(readable(floor, range(6)))
        floor.close()
    assert broken > 0


def test_a_slot_reused_before_its_delete_is_durable_gives_no_wrong_byte(memory_path: Path) -> None:
    """Even if the order of a delete were wrong, the header tells: a miss, not another page's bytes."""

    def act(floor: RankFloor, io: TracingDisk) -> None:
        store(floor, range(4))
        for number in range(4):
            write_page(floor.slab, floor.live[page_hash(number)].slot, 10 + number)
        floor.slab.sync()

    trace = record(memory_path / "old", act)
    for number, state in enumerate(power_cuts(trace, random.Random(1), first=behind_probe(trace), per_point=2)):
        check_state(state, memory_path / "old", memory_path / str(number), ready=False)
    assert number > 20


def test_a_cut_during_a_clear_leaves_all_or_nothing_and_a_start(memory_path: Path) -> None:
    folder = memory_path / "old"
    floor = open_one(config_for(folder, BUDGET))
    store(floor, range(8))
    floor.close()
    before = snapshot(folder)
    io = TracingDisk(NoSync())
    floor = open_one(config_for(folder, BUDGET, cold_start="clear"), io=io)
    assert floor.live == {}
    floor.close()
    seen = set()
    cuts = power_cuts(io.trace, random.Random(1), start=before, first=behind_probe(io.trace), per_point=1)
    for number, state in enumerate(cuts):
        build_state(state, folder, memory_path / str(number))
        floor = open_one(config_for(memory_path / str(number), BUDGET), io=NoSync())
        seen.add(len(readable(floor, range(8))))
        floor.close()
    assert seen == {0, 8}


def test_a_cut_while_pages_move_loses_none(memory_path: Path) -> None:
    folder = memory_path / "old"
    floor = open_one(config_for(folder, 1024 * 1024))
    num = floor.slab.num_slots - 55
    for number in range(num + 40):  # so that the last ones lie behind the new end
        store(floor, [number])
    for number in range(0, 80, 2):
        floor.index.apply([], [page_hash(number)])
    floor.close()
    kept = [n for n in range(num + 40) if n >= 80 or n % 2]
    before = snapshot(folder)
    io = TracingDisk(NoSync())
    open_one(config_for(folder, 1024 * 1024), num_ranks=2, io=io).close()
    assert sum(event.kind == "committed" for event in io.trace) >= 2
    cuts = power_cuts(io.trace, random.Random(1), start=before, first=behind_probe(io.trace), per_point=1)
    for number, state in enumerate(cuts):
        build_state(state, folder, memory_path / str(number))
        found: list[int] = []
        for rank in range(2):
            config = config_for(memory_path / str(number), 1024 * 1024)
            floor = open_one(config, rank=rank, num_ranks=2, io=NoSync(), prepare=rank == 0)
            floor.pool.check()
            found += readable(floor, kept)
            floor.close()
        assert sorted(set(found)) == kept
    assert number > 100


def test_the_trace_tells_a_sync_that_came_too_early() -> None:
    path = Path("/x/slab-0.dat")
    trace = [
        Event("create", path),
        Event("folder", path.parent),
        Event("write", path, 0, data=b"a" * 4096),
        Event("write", path, 4096, data=b"b" * 4096),
        Event("sync", path, 4, not_covered=frozenset({3})),  # the second write was still under way
    ]
    last = [state.files[path] for state in list(power_cuts(trace, random.Random(2), per_point=0))[-2:]]
    assert bytes(last[0]) == b"a" * 4096
    assert bytes(last[1]) == b"a" * 4096 + b"b" * 4096
    commit = IndexCommit(path, ((b"k", b"v"),), ())
    states = list(power_cuts([Event("commit", path, commit=commit)], random.Random(2), per_point=0))
    assert [state.indexes for state in states] == [{}, {}, {}, {path: {b"k": b"v"}}]
