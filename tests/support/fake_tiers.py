"""A copy engine and a disk that keep time in ticks, for an engine without a model: late, failing, and unforgiving.

Pages and frames hold token ids, as the fake runner's pool does, so whatever is moved too early, too late or to the
wrong place gives a wrong token. Everything moves as late as it may: a load-back reads its frames when it completes, or
when a forward that waits for it runs; a disk read lands when its time comes, past its deadline too.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benthic.common.layout import owner_of
from benthic.engine.tier_workers import DiskCommand
from benthic.forward import LayerHooks
from benthic.kvcache.commands import (
    DONE,
    FAILED,
    ClearDisk,
    Completion,
    Drain,
    Lookup,
    OpId,
    Reload,
    Spill,
    Touch,
)
from benthic.kvcache.lanes import Lane, Lanes
from benthic.messages import DiskStats
from tests.support.fake_runner import POISON, FakeDevice

GARBAGE = -13  # what a failed transfer leaves behind

Page = tuple[int, ...]  # token ids
Shelf = dict[bytes, Page]  # what a disk holds, by content hash; it outlives the engine


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How late and how often wrong; shares are of operations, or of pages where the disk reads."""

    seed: int = 0
    copy_ticks: tuple[int, int] = (0, 0)  # from the command to the end, at least and at most
    disk_ticks: tuple[int, int] = (1, 1)
    backup_fails: float = 0.0
    gather_fails: float = 0.0
    durable_fails: float = 0.0
    lookup_short: float = 0.0
    read_fails: float = 0.0
    read_hangs: float = 0.0
    hang_ticks: int = 80  # of a read that hangs


@dataclass(eq=False)
class Truth:
    """What a page with a hash must hold; and the tick, for both tiers."""

    tick: int = 0
    pages: Shelf = field(default_factory=dict)


class FakeStep:
    """Hooks of one step."""

    def __init__(self, copies: "FakeCopies", waits: Sequence[OpId]) -> None:
        self.has_run = False
        self._copies, self._waits = copies, tuple(waits)

    def begin(self) -> None:
        """Nothing to prepare."""

    def before_layer(self, index: int) -> None:
        raise AssertionError("the fake runner has no layers")

    def after_layer(self, index: int) -> None:
        raise AssertionError("the fake runner has no layers")

    def before_all(self) -> None:
        """What the forward waits for is moved now at the latest."""
        for op in self._waits:
            self._copies.move_now(op)

    def after_all(self) -> None:
        """The pages are written."""

    def end(self, failed: bool) -> None:
        assert not failed
        self.has_run = True
        self._copies.advance()


@dataclass(eq=False)
class _Copy:
    op: OpId
    pages: tuple[int, ...]
    frames: tuple[int, ...]
    after: FakeStep | None
    due: int
    is_load_back: bool
    fails: bool = False
    moved: bool = False


class FakeCopies:
    """Implements CopyEngine between one lane of a fake device and one lane of frames."""

    num_groups = 1

    def __init__(self, device: FakeDevice, lane: int, num_frames: int, weather: Weather, truth: Truth) -> None:
        self.frames = np.full((num_frames, device.page_size), POISON, np.int64)
        self.held_back = False  # nothing completes by itself
        self.num_backups = self.num_load_backs = 0
        self._pool = device.kv[lane].reshape(-1, device.page_size)
        self._weather, self._truth = weather, truth
        self._dice = random.Random(f"copies {weather.seed} {lane}")
        self._under_way: dict[OpId, _Copy] = {}
        self._done: list[Completion] = []
        self._last: FakeStep | None = None

    def step_hooks(self, loadbacks: Sequence[OpId]) -> FakeStep:
        self._last = FakeStep(self, loadbacks)
        return self._last

    def backup(self, op: OpId, pages: Sequence[int], frames: Sequence[int], after: LayerHooks) -> None:
        assert after is self._last, "a backup goes behind the last step launched"
        assert isinstance(after, FakeStep)
        self.num_backups += 1
        fails = self._dice.random() < self._weather.backup_fails
        self._take(_Copy(op, tuple(pages), tuple(frames), after, self._due(), is_load_back=False, fails=fails))

    def load_back(
        self, op: OpId, frames: Sequence[int], pages: Sequence[int], after: LayerHooks | None, *, waited: bool = False
    ) -> None:
        assert after is self._last, "a copy into L1 waits for the last step launched before it"
        assert after is None or isinstance(after, FakeStep)
        self.num_load_backs += 1
        self._take(_Copy(op, tuple(pages), tuple(frames), after, self._due(), is_load_back=True))

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        for op in list(self._under_way):
            self.move_now(op)

    def advance(self) -> None:
        """What is due happens, in whatever order."""
        if self.held_back:
            return
        for copy in list(self._under_way.values()):
            if copy.due <= self._truth.tick and (copy.after is None or copy.after.has_run):
                self.move_now(copy.op)
                del self._under_way[copy.op]
                self._done.append(Completion(copy.op, FAILED if copy.fails else DONE))

    def move_now(self, op: OpId) -> None:
        """Move it, whenever its completion is due; nothing if that is over."""
        copy = self._under_way.get(op)
        if copy is None or copy.moved:
            return
        assert copy.after is None or copy.after.has_run, "the forward that is waited for comes later"
        copy.moved = True
        for page, frame in zip(copy.pages, copy.frames, strict=True):
            if copy.is_load_back:
                self._pool[page] = self.frames[frame]
            else:
                self.frames[frame] = GARBAGE if copy.fails else self._pool[page]

    def freed_page(self, page: int) -> None:
        """The core lets go of this page."""
        for copy in self._under_way.values():
            assert page not in copy.pages, f"page {page} is freed under operation {copy.op}"

    def freed_frame(self, frame: int) -> None:
        """The core lets go of this frame: what is in it is lost."""
        for copy in self._under_way.values():
            assert frame not in copy.frames, f"frame {frame} is freed under operation {copy.op}"
        self.frames[frame] = POISON

    def _take(self, copy: _Copy) -> None:
        assert copy.op not in self._under_way
        assert len(copy.pages) == len(copy.frames) > 0
        self._under_way[copy.op] = copy

    def _due(self) -> int:
        return self._truth.tick + self._dice.randint(*self._weather.copy_ticks)


@dataclass(eq=False)
class _Job:
    """An operation of the disk with the positions of this rank's pages in it."""

    command: Spill | Lookup | Reload | ClearDisk
    own: tuple[int, ...]
    due: int
    gathered: dict[int, Page] | None = None  # of a spill, by position
    gather_failed: bool = False
    fails: bool = False
    reads: dict[int, int] = field(default_factory=dict)  # of a reload: position -> tick in which it lands
    begun: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    settled: bool = False  # a reload whose answer is given: what still lands is for nobody


class FakeDisk:
    """Implements Disk for one rank over a shelf that outlives it. `stuck`: nothing moves."""

    def __init__(
        self, shelf: Shelf, copies: FakeCopies, *, rank: int, num_owners: int, staging: int, weather: Weather,
        truth: Truth,
    ) -> None:  # fmt: skip
        self.shelf = shelf
        self.stuck = False
        self.ages: dict[bytes, int] = {}
        self.us_per_page_read = 0
        self.read_ends: list[int] = []  # ticks in which pages landed
        self.closed = False
        self._frames = copies.frames
        self._rank, self._num_owners, self._staging = rank, num_owners, staging
        self._weather, self._truth = weather, truth
        self._dice = random.Random(f"disk {weather.seed} {rank}")
        self._jobs: dict[OpId, _Job] = {}  # a spill by its durable's id
        self._drains: dict[OpId, OpId] = {}  # drain -> reload
        self._done: list[Completion] = []

    # --- the interface ------------------------------------------------------------------------------------------------

    def submit(self, command: DiskCommand) -> None:
        assert not self.closed
        match command:
            case Touch():
                for i in self._own(command.first, len(command.hashes)):
                    self.ages[command.hashes[i]] = command.age
            case Drain():
                self._drains[command.op] = command.reload
            case ClearDisk():
                assert not self._jobs, "the disk is cleared beside other operations"
                assert not self._drains
                self._jobs[command.op] = _Job(command, (), self._due())
            case Spill():
                self._jobs[command.durable] = _Job(
                    command,
                    self._own(command.first, len(command.frames)),
                    self._due(),
                    gather_failed=self._chance(self._weather.gather_fails),
                    fails=self._chance(self._weather.durable_fails),
                )
            case Lookup() | Reload():
                job = _Job(command, self._own(command.first, len(command.hashes)), self._due())
                if isinstance(command, Reload):
                    self._plan_reads(job)
                self._jobs[command.op] = job

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def report_now(self, op: OpId) -> int:
        """The answer by what is there by now; reads that have begun land all the same."""
        job = self._jobs[op]
        assert isinstance(job.command, Lookup | Reload)
        if isinstance(job.command, Lookup):
            del self._jobs[op]
            return 1 + self._first(job, lambda i: True)
        value = 1 + self._first(job, lambda i: i in job.reads or i in job.bad)
        self._settle(job, op)
        return value

    def stats(self) -> DiskStats:
        return DiskStats(
            rank=self._rank, path="shelf", direct=True, slots_total=1 << 20, slots_used=len(self.shelf),
            slots_retired=0, slot_bytes=8, staging_total=self._staging, staging_used=self.staging_used, write_queue=0,
            read_queue=0, spilled_pages=0, spilled_bytes=0, reloaded_pages=0, reloaded_bytes=0, duplicate_pages=0,
            collected_pages=0, index_commits=0, write_errors=0, read_failures={},
            us_per_page_read=self.us_per_page_read,
        )  # fmt: skip

    def close(self, finish_by_s: float) -> None:
        self.closed = True

    # --- time ---------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """What is due happens."""
        if self.stuck:
            return
        for op, job in list(self._jobs.items()):
            if isinstance(job.command, Reload):
                self._read(op, job, job.command)
            elif job.due <= self._truth.tick:
                self._go_on(op, job)
        for drain, reload in list(self._drains.items()):
            if reload not in self._jobs:
                del self._drains[drain]
                self._done.append(Completion(drain, DONE))

    def _go_on(self, op: OpId, job: _Job) -> None:
        match job.command:
            case Spill():
                self._spill(op, job, job.command)
            case Lookup():
                del self._jobs[op]
                self._done.append(Completion(op, 1 + self._first(job, self._is_missing(job.command))))
            case ClearDisk():
                del self._jobs[op]
                self.shelf.clear()
                self._done.append(Completion(op, DONE))

    @property
    def staging_used(self) -> int:
        """Buffers of spills that are gathered and not yet over."""
        return sum(len(job.gathered) for job in self._jobs.values() if job.gathered is not None)

    def freed_frame(self, frame: int) -> None:
        """The core lets go of this frame."""
        assert frame not in set(self._busy_frames()), f"frame {frame} is freed under the disk"

    def _busy_frames(self) -> Iterator[int]:
        for job in self._jobs.values():
            if isinstance(job.command, Spill) and job.gathered is None:
                yield from (job.command.frames[i] for i in job.own)
            elif isinstance(job.command, Reload):
                yield from (job.command.frames[i] for i in job.reads)

    def _spill(self, op: OpId, job: _Job, spill: Spill) -> None:
        if job.gathered is None:
            pages = {i: self._page(spill.frames[i]) for i in job.own}
            for i, page in pages.items():
                assert page == self._truth.pages[spill.hashes[i]], "a gather reads another page than it says"
            job.gathered = {} if job.gather_failed else pages
            assert self.staging_used <= self._staging, "more is gathered than there are buffers"
            self._done.append(Completion(spill.gather, FAILED if job.gather_failed else DONE))
            job.due = self._due() if job.own else self._truth.tick
            return
        del self._jobs[op]
        fails = (job.fails or job.gather_failed) and bool(job.own)
        stored = list(job.gathered.items())
        for i, page in stored[: len(stored) // 2] if fails else stored:
            self.shelf[spill.hashes[i]] = page
        self._done.append(Completion(op, FAILED if fails else DONE))

    def _plan_reads(self, job: _Job) -> None:
        for i in job.own:
            hangs = self._chance(self._weather.read_hangs)
            job.reads[i] = self._due() + (self._weather.hang_ticks if hangs else 0)

    def _read(self, op: OpId, job: _Job, reload: Reload) -> None:
        now = self._truth.tick
        for i, lands in list(job.reads.items()):
            job.begun.add(i)
            if lands > now:
                continue
            del job.reads[i]
            page = self.shelf.get(reload.hashes[i])
            if page is None or self._chance(self._weather.read_fails):
                job.bad.add(i)
                self._frames[reload.frames[i]] = GARBAGE
            else:
                assert page == self._truth.pages[reload.hashes[i]]
                self._frames[reload.frames[i]] = page
            self.read_ends.append(now)
        if job.reads:
            return
        del self._jobs[op]
        if not job.settled:
            self._done.append(Completion(op, 1 + self._first(job, lambda i: i in job.bad)))

    def _settle(self, job: _Job, op: OpId) -> None:
        job.settled = True
        for i in list(job.reads):
            if i not in job.begun:
                del job.reads[i]
        if not job.reads:
            del self._jobs[op]

    # --- small things -------------------------------------------------------------------------------------------------

    def _is_missing(self, lookup: Lookup) -> Callable[[int], bool]:
        short = self._chance(self._weather.lookup_short)
        return lambda i: lookup.hashes[i] not in self.shelf or (short and self._chance(0.3))

    def _first(self, job: _Job, is_bad: Callable[[int], bool]) -> int:
        """The first own position that can't be given, else the operation's length."""
        assert isinstance(job.command, Lookup | Reload)
        return next((i for i in job.own if is_bad(i)), len(job.command.hashes))

    def _own(self, first: int, count: int) -> tuple[int, ...]:
        return tuple(i for i in range(count) if owner_of(first + i, self._num_owners) == self._rank)

    def _page(self, frame: int) -> Page:
        return tuple(self._frames[frame].tolist())

    def _chance(self, share: float) -> bool:
        return share > 0 and self._dice.random() < share

    def _due(self) -> int:
        return self._truth.tick + self._dice.randint(*self._weather.disk_ticks)


class WatchedLane(Lane):
    """A lane that tells about pages given back."""

    __slots__ = ("_freed",)

    def __init__(self, owner: int, total: int, freed: Callable[[int], None]) -> None:
        super().__init__(owner, total)
        self._freed = freed

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        for page in pages:
            self._freed(page)


def watch(lanes: Lanes, lane: int, freed: Callable[[int], None]) -> None:
    """Call `freed` for every page that this lane gets back; for lanes not used yet."""
    lanes._lanes[lane] = WatchedLane(lane, lanes[lane].total, freed)
