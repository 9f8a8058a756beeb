"""Another number of ranks or another budget: every page is still found, once, and what must go is the oldest."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.config.disk import DiskConfig, DiskSpec
from benthic.tiers.disk.floor import RankFloor, find_foreign
from benthic.tiers.disk.format import Verdict
from benthic.tiers.disk.index import Entry, IndexFile, SlotIndex
from benthic.tiers.disk.layout import FilePlan, namespace_folder
from benthic.tiers.disk.restripe import RestripeReport, restripe
from benthic.tiers.disk.slab import Slab, SlabFile, reserve_file
from tests.support.disk_floor import (
    GEOMETRY,
    KIB,
    NAMESPACE,
    NoSync,
    config_for,
    flip_bit,
    open_one,
    page_hash,
    read_page,
    readable,
    store,
    write_page,
)

SLOT = GEOMETRY.slot_bytes
MAP = 1 << 20


def lay_out(folder: Path, sizes: list[int], disks: list[int]) -> list[FilePlan]:
    return [
        FilePlan(k, disk, folder / f"slab-{k}.dat", folder / f"index-{k}.lmdb", size, MAP)
        for k, (size, disk) in enumerate(zip(sizes, disks, strict=True))
    ]


def fill(folder: Path, old: list[int], pages: dict[int, tuple[int, int, int]]) -> None:
    """Make slabs of these sizes; `pages`: number → file, slot, age. Page n has position n."""
    io = NoSync()
    for k, size in enumerate(old):
        reserve_file(folder / f"slab-{k}.dat", size * SLOT, io)
        slab = Slab([SlabFile(folder / f"slab-{k}.dat", size, GEOMETRY, io)])
        index = SlotIndex([(IndexFile(folder / f"index-{k}.lmdb", MAP, io), size)])
        own = {n: (slot, age) for n, (file, slot, age) in pages.items() if file == k}
        for n, (slot, _) in own.items():
            write_page(slab, slot, n)
        slab.sync()
        index.apply([(page_hash(n), Entry(slot, n, age)) for n, (slot, age) in own.items()], [])
        index.close()
        slab.close()


def found_after(folder: Path, plans: list[FilePlan]) -> dict[int, list[tuple[int, int]]]:
    """Where each page is found, whole: number → (file, slot), read through fresh files."""
    io = NoSync()
    found: dict[int, list[tuple[int, int]]] = {}
    for plan in plans:
        if not plan.slab.exists():
            continue
        num_slots = plan.slab.stat().st_size // SLOT
        slab = Slab([SlabFile(plan.slab, num_slots, GEOMETRY, io)])
        index = IndexFile(plan.index, MAP, io)
        for key, entry in index.load():
            assert entry is not None
            assert entry.slot < min(num_slots, plan.num_slots)
            assert key == page_hash(entry.position)
            assert read_page(slab, entry.slot, entry.position) is Verdict.OK
            found.setdefault(entry.position, []).append((plan.number, entry.slot))
        index.close()
        slab.close()
    return found


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], dict[int, tuple[int, int, int]], int]:
    """Old and new sizes, disks, pages in random slots with random ages, number of ranks."""
    num_old, num_new = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    old = draw(st.lists(st.integers(1, 12), min_size=num_old, max_size=num_old))
    num = max(num_old, num_new)
    new = draw(st.lists(st.integers(1, 12), min_size=num, max_size=num))
    disks = draw(st.lists(st.integers(0, 1), min_size=num, max_size=num))
    slots = [(file, slot) for file, size in enumerate(old) for slot in range(size)]
    rng = random.Random(draw(st.integers(0, 2**32)))
    chosen = rng.sample(slots, draw(st.integers(0, len(slots))))
    pages = {n: (file, slot, rng.randrange(10)) for n, (file, slot) in enumerate(chosen)}
    return old, new, disks, pages, draw(st.integers(1, 4))


@settings(max_examples=80, deadline=None)
@given(problems())
def test_pages_are_found_once_and_the_newest_stay(
    tmp_path_factory: pytest.TempPathFactory,
    problem: tuple[list[int], list[int], list[int], dict[int, tuple[int, int, int]], int],
) -> None:
    old, new, disks, pages, num_ranks = problem
    folder = tmp_path_factory.mktemp("floor")
    fill(folder, old, pages)
    plans = lay_out(folder, new, disks)
    report = restripe(plans, GEOMETRY, num_ranks, NoSync(), lambda what, done, total: None)
    found = found_after(folder, plans)
    assert all(len(places) == 1 for places in found.values())
    assert len(pages) - len(found) == report.dropped_oldest
    order = sorted(pages, key=lambda n: (pages[n][2], -n))  # the oldest first, of an age the later position
    assert sorted(found) == sorted(order[report.dropped_oldest :])
    room = sum(new)
    assert report.dropped_oldest == 0 if len(pages) < room else report.dropped_oldest <= len(pages) - room + 16


def test_the_budget_holds_while_pages_move(tmp_path: Path) -> None:
    old = [100, 100]
    new = [50, 50, 50, 50]
    rng = random.Random(3)
    slots = rng.sample([(f, s) for f in range(2) for s in range(100)], 180)
    fill(tmp_path, old, {n: (file, slot, n) for n, (file, slot) in enumerate(slots)})
    most = [0]

    class Watching(NoSync):
        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            most[0] = max(most[0], sum(path.stat().st_size for path in tmp_path.glob("slab-*")))

    plans = lay_out(tmp_path, new, [0] * 4)
    heard: list[tuple[str, int, int]] = []
    report = restripe(plans, GEOMETRY, 4, Watching(), lambda *heard_of: heard.append(heard_of))
    assert report.dropped_oldest == 0
    assert len(found_after(tmp_path, plans)) == 180
    assert most[0] <= 200 * SLOT
    assert heard[-1][1] == heard[-1][2] > 0


def test_a_page_goes_to_its_owners_file_where_that_has_room(tmp_path: Path) -> None:
    fill(tmp_path, [8], {n: (0, n, n) for n in range(8)})
    plans = lay_out(tmp_path, [4, 4], [0, 1])
    restripe(plans, GEOMETRY, 2, NoSync(), lambda what, done, total: None)
    found = found_after(tmp_path, plans)
    assert {n for n, [(file, _)] in found.items() if file == 1} >= {5, 7}


def test_damaged_pages_are_not_moved(tmp_path: Path) -> None:
    fill(tmp_path, [10], {n: (0, n, n) for n in range(2, 10)})
    flip_bit(tmp_path / "slab-0.dat", 8 * (9 * SLOT + 5000))
    plans = lay_out(tmp_path, [9], [0])
    report = restripe(plans, GEOMETRY, 1, NoSync(), lambda what, done, total: None)
    assert report == RestripeReport(dropped_dead=1)
    assert sorted(found_after(tmp_path, plans)) == list(range(2, 9))


def test_of_a_page_in_two_files_the_one_used_last_stays(tmp_path: Path) -> None:
    fill(tmp_path, [5, 5], {1: (0, 4, 10), 2: (1, 4, 3)})
    floor_like = lay_out(tmp_path, [5, 5], [0, 0])
    io = NoSync()
    slab = Slab([SlabFile(tmp_path / "slab-1.dat", 5, GEOMETRY, io)])
    write_page(slab, 2, 1)  # a second copy of page 1, as a kill between two commits of a move leaves it
    slab.close()
    index = SlotIndex([(IndexFile(tmp_path / "index-1.lmdb", MAP, io), 5)])
    index.apply([(page_hash(1), Entry(2, 1, 20))], [])
    index.close()
    plans = [replace(plan, num_slots=4) for plan in floor_like]
    restripe(plans, GEOMETRY, 2, io, lambda what, done, total: None)
    found = found_after(tmp_path, plans)
    assert found[1] == [(1, 2)]
    assert len(found[2]) == 1


def open_all(config: DiskConfig, num_ranks: int) -> list[RankFloor]:
    """Every rank's floor, one after another: LMDB opens a file once in a process."""
    floors = []
    for rank in range(num_ranks):
        floor = open_one(config, rank=rank, num_ranks=num_ranks, prepare=rank == 0, io=NoSync())
        floors.append(floor)
    return floors


@pytest.mark.parametrize("num_disks", [1, 2])
def test_ranks_come_and_go_and_every_page_is_found(tmp_path: Path, num_disks: int) -> None:
    disks = tuple(DiskSpec(path=tmp_path / str(n), budget_bytes=4096 * KIB // num_disks) for n in range(num_disks))
    config = DiskConfig(disks=disks)
    floors = open_all(config, 2)
    num = sum(floor.slab.num_slots for floor in floors) // 2
    for rank, floor in enumerate(floors):
        store(floor, range(rank, num, 2))
        floor.close()
    for num_ranks in (4, 3, 1, 2, 8, 2):
        floors = open_all(config, num_ranks)
        got = [readable(floor, range(num)) for floor in floors]
        assert sorted(n for own in got for n in own) == list(range(num))
        for rank, (floor, own) in enumerate(zip(floors, got, strict=True)):
            assert floor.report.misplaced_pages == sum(n % num_ranks != rank for n in own)
            floor.close()
        used = sum(p.stat().st_size for d in disks for p in namespace_folder(d.path, NAMESPACE).glob("*"))
        assert used <= 4096 * KIB


def test_fewer_ranks_by_a_whole_factor_find_all_in_their_own_files(tmp_path: Path) -> None:
    config = config_for(tmp_path, 4096 * KIB)
    for rank, floor in enumerate(open_all(config, 4)):
        store(floor, range(rank, 100, 4))
        floor.close()
    for rank, floor in enumerate(open_all(config, 2)):
        assert floor.report.misplaced_pages == 0
        assert sorted(readable(floor, range(100))) == list(range(rank, 100, 2))
        assert [file.path.name for file in floor.slab.files] == [f"slab-{rank}.dat", f"slab-{rank + 2}.dat"]
        store(floor, range(100 + rank, 160, 2))
        assert len(readable(floor, range(100 + rank, 160, 2))) == 30
        floor.close()


def test_more_ranks_find_their_pages_in_the_files_of_others(tmp_path: Path) -> None:
    config = config_for(tmp_path, 4096 * KIB)
    floor = open_one(config)
    store(floor, range(100))
    floor.close()
    io = NoSync()
    open_one(config, rank=0, num_ranks=2).close()
    floor = open_one(config, rank=1, num_ranks=2, prepare=False)
    own = set(readable(floor, range(100)))
    find_foreign(config, floor, namespace=NAMESPACE, geometry=GEOMETRY, num_ranks=2, io=io)
    foreign = {entry.position: (slab, entry.slot) for slab, entry in floor.foreign.values()}
    assert set(foreign) == set(range(1, 100, 2)) - own
    assert len(foreign) > 0
    assert all(read_page(slab, slot, n) is Verdict.OK for n, (slab, slot) in foreign.items())
    floor.close()


def test_a_drained_file_goes_and_its_budget_returns(tmp_path: Path) -> None:
    config = config_for(tmp_path, 4096 * KIB)
    for floor in open_all(config, 4):
        floor.close()
    floor = open_one(config, num_ranks=1, io=NoSync())
    assert [path.name for path in namespace_folder(tmp_path, NAMESPACE).glob("slab-*")] == ["slab-0.dat"]
    assert floor.slab.num_slots > 400
    floor.close()
