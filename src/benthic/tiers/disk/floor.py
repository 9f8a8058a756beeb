"""Open one rank's part of a model's floor, with what an earlier run has left in it.

`prepare_floor` is for one process, before any rank opens its files; with one rank `open_floor` calls it. The folders'
locks are held by the caller (`lock_folders`).
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benthic.config.disk import DiskConfig
from benthic.tiers.disk.format import FrameGeometry
from benthic.tiers.disk.index import Entry, IndexDamaged, SlotIndex, read_entries
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.disk.layout import FilePlan, plan_files
from benthic.tiers.disk.prepare import Prepared, prepare_floor
from benthic.tiers.disk.recovery import header_reader, open_index, resolve
from benthic.tiers.disk.refusal import refusal
from benthic.tiers.disk.restripe import Progress
from benthic.tiers.disk.slab import Slab, SlabFile
from benthic.tiers.disk.slots import SlotPool


@dataclass(frozen=True, slots=True)
class FloorReport:
    """What the start found: for the log, the start-up table and `/cache`."""

    num_slots: int
    live_pages: int
    dropped_entries: int  # damaged, past the end of the file, or second owners of a slot
    misplaced_pages: int  # in this rank's files, but another rank's by their position
    rebuilt: tuple[str, ...]  # why an index was made anew
    seconds: float
    prepared: Prepared | None  # None: another process has done it


@dataclass
class RankFloor:
    """One rank's open files and what lives in them. `index`, `pool` and `live` belong to one thread."""

    rank: int
    slab: Slab
    index: SlotIndex
    pool: SlotPool
    live: dict[bytes, Entry]
    next_age: int  # above every stored one, so that ages go on over restarts
    foreign: dict[bytes, tuple[Slab, Entry]]  # this rank's pages in other owners' files; see `find_foreign`
    report: FloorReport

    def close(self) -> None:
        """Close every file; nothing may be under way."""
        self.slab.close()
        self.index.close()
        for slab in {id(slab): slab for slab, _ in self.foreign.values()}.values():
            slab.close()


def open_floor(
    config: DiskConfig,
    *,
    namespace: bytes,
    words: dict[str, str],
    geometry: FrameGeometry,
    rank: int,
    num_ranks: int,
    io: DiskIO,
    progress: Progress = lambda what, done, total: None,
    prepare: bool = True,
) -> RankFloor:
    """Open the files of `rank`, made and laid out first if `prepare`, which only one process may do at a time.

    Serving can begin at once: slots whose headers turn out wrong are misses. Raises ConfigError, CapacityError.
    """
    start = time.monotonic()
    prepared = None
    if prepare:
        prepared = prepare_floor(
            config, namespace=namespace, words=words, geometry=geometry, num_ranks=num_ranks, io=io, progress=progress
        )
    files = [plan for plan in plan_files(config, namespace, geometry, num_ranks) if plan.owner(num_ranks) == rank]
    files.sort(key=lambda plan: plan.number != rank)  # the rank's own first, then those it has inherited
    try:
        with ExitStack() as stack:
            slab = Slab([_open_slab(plan, geometry, io, stack) for plan in files])
            index, rebuilt = _open_indexes(files, slab, io, stack)
            live, dropped = _recover(index, slab)
            stack.pop_all()
    except OSError as error:
        path = Path(str(error.filename)) if error.filename else files[0].slab
        raise refusal("open", path, error) from error
    if prepared is not None:
        rebuilt = (*prepared.restriped.rebuilt, *rebuilt)
    report = FloorReport(
        num_slots=slab.num_slots,
        live_pages=len(live),
        dropped_entries=dropped,
        misplaced_pages=sum(entry.position % num_ranks != rank for entry in live.values()),
        rebuilt=rebuilt,
        seconds=time.monotonic() - start,
        prepared=prepared,
    )
    return RankFloor(
        rank=rank,
        slab=slab,
        index=index,
        pool=SlotPool.from_live(slab.num_slots, (entry.slot for entry in live.values())),
        live=live,
        next_age=1 + max((entry.age for entry in live.values()), default=0),
        foreign={},
        report=report,
    )


def find_foreign(
    config: DiskConfig, floor: RankFloor, *, namespace: bytes, geometry: FrameGeometry, num_ranks: int, io: DiskIO
) -> int:
    """Fill `floor.foreign` from the indexes of the other ranks' files; returns how many pages were found.

    To be called where any rank reports misplaced pages (an agreed fact), when all have opened their floors and before
    any writer starts. Raises OSError.
    """
    for plan in plan_files(config, namespace, geometry, num_ranks):
        if plan.owner(num_ranks) == floor.rank or not (plan.index.exists() and plan.slab.exists()):
            continue
        num_slots = plan.slab.stat().st_size // geometry.slot_bytes
        try:
            stored = read_entries(plan.index, live=True)
        except IndexDamaged:
            continue  # its owner says so
        wanted = {
            key: entry
            for key, entry in stored
            if entry is not None and entry.slot < num_slots and entry.position % num_ranks == floor.rank
        }
        found = [key for key in wanted if key not in floor.live]
        if found:
            slab = Slab([SlabFile(plan.slab, num_slots, geometry, io, read_only=True)])
            floor.foreign.update({key: (slab, wanted[key]) for key in found})
    return len(floor.foreign)


def _open_slab(plan: FilePlan, geometry: FrameGeometry, io: DiskIO, stack: ExitStack) -> SlabFile:
    num_slots = plan.slab.stat().st_size // geometry.slot_bytes
    file = SlabFile(plan.slab, num_slots, geometry, io)
    stack.callback(file.close)
    return file


def _open_indexes(
    files: Sequence[FilePlan], slab: Slab, io: DiskIO, stack: ExitStack
) -> tuple[SlotIndex, tuple[str, ...]]:
    opened = []
    rebuilt = []
    for plan, slab_file in zip(files, slab.files, strict=True):
        file, why = open_index(plan.index, plan.index_bytes, io)
        stack.callback(file.close)
        opened.append((file, slab_file.num_slots))
        if why:
            rebuilt.append(f"{plan.index}: {why}")
    return SlotIndex(opened), tuple(rebuilt)


def _recover(index: SlotIndex, slab: Slab) -> tuple[dict[bytes, Entry], int]:
    """The live pages, and how many entries were dropped, from the index too. Of a page that two files hold, as a kill
    between two commits leaves it, the copy used last stays."""
    live: dict[bytes, Entry] = {}
    dropped: list[set[bytes]] = []
    base = 0
    for index_file, slab_file in zip(index.files, slab.files, strict=True):
        hash_in = header_reader(slab_file.read_header, slab_file.geometry)
        found, gone = resolve(index_file.load(), slab_file.num_slots, hash_in)
        dropped.append(set(gone))
        for key, entry in found.items():
            other = live.get(key)
            if other is not None:
                ours = entry.age > other.age
                number = slab.number_of(other.slot) if ours else len(dropped) - 1
                dropped[number].add(key)
                if not ours:
                    continue
            live[key] = replace(entry, slot=base + entry.slot)
        base += slab_file.num_slots
    for number, keys in enumerate(dropped):
        index.drop_stored(number, sorted(keys))
    return live, sum(len(keys) for keys in dropped)
