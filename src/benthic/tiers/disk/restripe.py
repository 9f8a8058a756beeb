"""Fit what is stored into files of other sizes: after another budget, another number of ranks, or a truncation.

One process does this before the ranks open their files. A page behind its file's new end is copied to a free slot of
any file, is made durable there, and only then leaves its old place; so a kill at any point leaves each page at least
once. Files grow only as others have shrunk: the budget holds meanwhile. The oldest pages are dropped only where
no file has room.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benthic.common.units import MIB
from benthic.tiers.disk.format import PAGE, FrameGeometry, Verdict, check
from benthic.tiers.disk.index import Entry, IndexFile, pack_value
from benthic.tiers.disk.io import DiskIO, IndexCommit
from benthic.tiers.disk.layout import FilePlan
from benthic.tiers.disk.recovery import header_reader, open_index, resolve
from benthic.tiers.disk.slab import SlabFile, aligned_buffer, reserve_file

logger = logging.getLogger(__name__)

_BATCH_BYTES = 64 * MIB
_MOST_PAGES = 256
_SPARE = 16  # pages given up where there is no free slot at all to begin with

Progress = Callable[[str, int, int], None]  # what, done, of how many


@dataclass(slots=True)
class RestripeReport:
    """What became of the pages; all zero where nothing had to be done."""

    moved: int = 0
    dropped_oldest: int = 0  # no file had room
    dropped_dead: int = 0  # damaged, or past the end of a file that was cut off
    rebuilt: list[str] = field(default_factory=list)  # indexes that were damaged


@dataclass(frozen=True, slots=True)
class _Page:
    hash: bytes
    entry: Entry
    file: int  # position in the list of files


class _File:
    """One slab file as it is now, on its way to its plan."""

    def __init__(self, plan: FilePlan, geometry: FrameGeometry, io: DiskIO) -> None:
        self.plan = plan
        self.geometry = geometry
        self.io = io
        size = plan.slab.stat().st_size if plan.slab.exists() else 0
        self.end = size // geometry.slot_bytes
        self.slab: SlabFile | None = None
        self.index: IndexFile | None = None
        self.rebuilt = ""
        self.pages: dict[int, _Page] = {}  # by slot
        self.free: list[int] = []

    def open_index(self) -> IndexFile:
        if self.index is None:
            self.index, self.rebuilt = open_index(self.plan.index, self.plan.index_bytes, self.io)
        return self.index

    def open_slab(self) -> SlabFile:
        if self.slab is None:
            self.slab = SlabFile(self.plan.slab, max(self.end, self.plan.num_slots), self.geometry, self.io)
        return self.slab

    def load(self, number: int) -> int:
        """Read what lives here; returns how many entries were dead and are dropped."""
        if not self.end and not self.plan.index.exists():
            return 0
        index = self.open_index()
        hash_in = header_reader(self.open_slab().read_header, self.geometry) if self.end else lambda slot: None
        live, dropped = resolve(index.load(), self.end, hash_in)
        if dropped:
            index.commit(IndexCommit(index.path, (), tuple(dropped)))
        self.pages = {entry.slot: _Page(key, entry, number) for key, entry in live.items()}
        self.free = [s for s in range(min(self.end, self.plan.num_slots) - 1, -1, -1) if s not in self.pages]
        return len(dropped)

    def shrink(self) -> None:
        """Cut off what lies behind the new end and behind the last live slot."""
        end = max(self.plan.num_slots, max(self.pages, default=-1) + 1)
        if end < self.end:
            reserve_file(self.plan.slab, end * self.geometry.slot_bytes, self.io)
            self.end = end

    def grow(self, num_slots: int) -> None:
        new_end = self.end + num_slots
        reserve_file(self.plan.slab, new_end * self.geometry.slot_bytes, self.io)
        self.free = [*range(new_end - 1, self.end - 1, -1), *self.free]
        self.end = new_end

    def close(self) -> None:
        if self.slab is not None:
            self.slab.close()
        if self.index is not None:
            self.index.close()


def needs_restripe(files: Sequence[FilePlan], geometry: FrameGeometry) -> bool:
    """Whether a file that exists has another size than planned."""
    return any(
        plan.slab.exists() and plan.slab.stat().st_size != plan.num_slots * geometry.slot_bytes for plan in files
    )


def restripe(
    files: Sequence[FilePlan], geometry: FrameGeometry, num_ranks: int, io: DiskIO, progress: Progress
) -> RestripeReport:
    """Move pages until each lies within its file's planned end; files may still have to grow to it. Raises OSError."""
    work = _Restripe([_File(plan, geometry, io) for plan in files], num_ranks, geometry, progress)
    try:
        work.run()
    finally:
        for file in work.files:
            file.close()
    report = work.report
    if report.moved or report.dropped_oldest or report.dropped_dead:
        logger.info(
            "disk floor laid out anew over %d files: %d pages moved, %d dropped as the oldest for lack of room, "
            "%d were damaged or cut off",
            len(files),
            report.moved,
            report.dropped_oldest,
            report.dropped_dead,
        )
    return report


class _Restripe:
    """The work in progress; owns the files."""

    def __init__(self, files: list[_File], num_ranks: int, geometry: FrameGeometry, progress: Progress) -> None:
        self.files = files
        self.report = RestripeReport()
        self._num_ranks = num_ranks
        self._geometry = geometry
        self._progress = progress
        self._batch = max(1, min(_MOST_PAGES, _BATCH_BYTES // geometry.slot_bytes))
        self._buffer = aligned_buffer(geometry.slot_bytes)

    def run(self) -> None:
        for number, file in enumerate(self.files):
            self.report.dropped_dead += file.load(number)
            if file.rebuilt:
                self.report.rebuilt.append(str(file.plan.index))
        self._drop(self._duplicates())
        num_live = sum(len(file.pages) for file in self.files)
        self._drop_oldest(num_live - sum(file.plan.num_slots for file in self.files))
        total = len(self._outside())
        while outside := self._outside():
            self._progress("moving pages", total - len(outside), total)
            self._shrink()
            batch = outside[: self._batch]
            if not self._move(batch) and not self._grow() and not self._compact():
                self._drop_oldest(min(_SPARE, len(outside)))
        self._shrink()
        if total:
            self._progress("moving pages", total, total)

    def _outside(self) -> list[_Page]:
        """Live pages behind their file's new end, each file's last ones first, so that it can be cut soon."""
        return [
            file.pages[slot]
            for file in self.files
            for slot in sorted(file.pages, reverse=True)
            if slot >= file.plan.num_slots
        ]

    def _duplicates(self) -> list[_Page]:
        """Older copies of pages that lie in two files, as a kill during a move leaves them."""
        newest: dict[bytes, _Page] = {}
        older = []
        for page in (page for file in self.files for page in file.pages.values()):
            other = newest.setdefault(page.hash, page)
            if other is not page:
                keep, go = (page, other) if page.entry.age > other.entry.age else (other, page)
                newest[page.hash] = keep
                older.append(go)
        return older

    def _drop_oldest(self, num_pages: int) -> None:
        if num_pages <= 0:
            return
        pages = [page for file in self.files for page in file.pages.values()]
        pages.sort(key=lambda page: (page.entry.age, -page.entry.position))
        self.report.dropped_oldest += len(pages[:num_pages])
        self._drop(pages[:num_pages])

    def _drop(self, pages: Sequence[_Page]) -> None:
        """Let pages go: first from the indexes, then their slots are free."""
        for number, file in enumerate(self.files):
            own = [page for page in pages if page.file == number]
            if own:
                file.open_index().commit(IndexCommit(file.plan.index, (), tuple(page.hash for page in own)))
                for page in own:
                    self._vacate(page)

    def _vacate(self, page: _Page) -> None:
        file = self.files[page.file]
        del file.pages[page.entry.slot]
        if page.entry.slot < file.plan.num_slots:
            file.free.append(page.entry.slot)

    def _shrink(self) -> None:
        for file in self.files:
            file.shrink()

    def _grow(self) -> bool:
        """Let files grow towards their plan by what others on their disk have given up; False if that's nothing."""
        grown = False
        for disk in sorted({file.plan.disk for file in self.files}):
            here = [file for file in self.files if file.plan.disk == disk]
            room = sum(file.plan.num_slots - file.end for file in here)
            for file in here:
                more = min(room, file.plan.num_slots - file.end)
                if more > 0:
                    file.grow(more)
                    room -= more
                    grown = True
        return grown

    def _move(self, pages: Sequence[_Page]) -> bool:
        """Copy pages to free slots, as far as there are any, make that durable, and drop the old entries."""
        targets = []
        for page in pages:
            target = self._target(page)
            if target is None:
                break
            targets.append((page, target, self.files[target].free.pop()))
        return self._carry_out(targets)

    def _compact(self) -> bool:
        """Move each file's last pages down into holes behind its new end, so that it can be cut for others to grow."""
        targets = []
        for number, file in enumerate(self.files):
            last = sorted((slot for slot in file.pages if slot >= file.plan.num_slots), reverse=True)
            holes = (slot for slot in range(file.plan.num_slots, file.end) if slot not in file.pages)
            pairs = itertools.takewhile(lambda pair: pair[1] < pair[0], zip(last, holes, strict=False))
            targets += [(file.pages[slot], number, hole) for slot, hole in itertools.islice(pairs, self._batch)]
        return self._carry_out(targets)

    def _carry_out(self, targets: Sequence[tuple[_Page, int, int]]) -> bool:
        """Copy each page to the file and slot named with it; True if there was one."""
        moved: list[tuple[_Page, _Page]] = []
        damaged: list[_Page] = []
        for page, number, slot in targets:
            file = self.files[number]
            if self._read(page):
                file.open_slab().write(slot, self._buffer[:PAGE], self._buffer[PAGE:])
                moved.append((page, _Page(page.hash, replace(page.entry, slot=slot), number)))
            else:
                damaged.append(page)
                if slot < file.plan.num_slots:
                    file.free.append(slot)
        self._settle(moved)
        self._drop(damaged)
        self.report.moved += len(moved)
        self.report.dropped_dead += len(damaged)
        return bool(targets)

    def _settle(self, moved: Sequence[tuple[_Page, _Page]]) -> None:
        """Make copies durable, then store where they are, then forget where they were."""
        for number, file in enumerate(self.files):
            new = [page for _, page in moved if page.file == number]
            if new:
                file.open_slab().sync()
                puts = tuple((page.hash, pack_value(page.hash, page.entry)) for page in new)
                file.open_index().commit(IndexCommit(file.plan.index, puts, ()))
                file.pages.update({page.entry.slot: page for page in new})
        for number, file in enumerate(self.files):
            old = [page for page, new in moved if page.file == number]
            left = tuple(page.hash for page, new in moved if page.file == number and new.file != number)
            if left:
                file.open_index().commit(IndexCommit(file.plan.index, (), left))
            for page in old:
                self._vacate(page)

    def _read(self, page: _Page) -> bool:
        """Read a page into the buffer; False if it's not what the index says."""
        header, frame = self._buffer[:PAGE], self._buffer[PAGE:]
        try:
            self.files[page.file].open_slab().read(page.entry.slot, header, frame)
        except OSError as error:
            logger.warning("%s: slot %d can't be moved: %s", self.files[page.file].plan.slab, page.entry.slot, error)
            return False
        return check(header, page.hash, frame, self._geometry) is Verdict.OK

    def _target(self, page: _Page) -> int | None:
        """The file to move to: its owner's, else its own, else the one with the most room."""
        owner = page.entry.position % self._num_ranks
        best, best_key = None, (False, False, 0)
        for number, file in enumerate(self.files):
            key = (file.plan.owner(self._num_ranks) == owner, number == page.file, len(file.free))
            if file.free and (best is None or key > best_key):
                best, best_key = number, key
        return best
