"""Simulated tier workers of one rank: memory as lists of cells, a disk as a dict, transfers that take their time.

The bytes of a page are its content hash, so a cell is right or it is not. A freed cell is poisoned: a read that comes
after its source was freed, or before it was filled, fails an assertion, and a late write shows in whoever has the cell.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benthic.common.layout import owner_of
from benthic.kvcache import CacheCore, Command, OpId, PageRun, Stream
from benthic.kvcache.commands import (
    DONE,
    FAILED,
    Backup,
    ClearDisk,
    Drain,
    LoadBack,
    Lookup,
    Reload,
    Spill,
    Touch,
)

POISON, GARBAGE, PRIVATE = b"poison", b"garbage", b"private"


@dataclass(slots=True, eq=False)
class Job:
    """One command under way on this rank; offsets count from the operation's first page."""

    command: Backup | LoadBack | Spill | Reload
    hashes: tuple[bytes, ...]
    todo: list[int]  # own offsets that are not begun
    started: list[int] = field(default_factory=list)  # a reload's reads under way
    done: list[int] = field(default_factory=list)
    failed: bool = False
    gathered: bool = False
    late: bool = False  # a reload reported past its deadline: only what was begun still ends
    ages: dict[bytes, int] = field(default_factory=dict)  # a spill's


class Worker:
    """One rank: lane `lane` of both tiers and the disk of that rank. Reports go to `seen`."""

    def __init__(self, core: CacheCore, lane: int, *, disk: dict[bytes, int] | None = None) -> None:
        self.core = core
        self.lane = lane
        self.num_owners = core.config.num_owners
        self.l1 = [POISON] * core.config.l1_pages
        self.l2 = [POISON] * core.config.l2_frames
        self.disk: dict[bytes, int] = {} if disk is None else disk  # page -> age
        self.seen: dict[OpId, int] = {}
        self.jobs: dict[OpId, Job] = {}
        self.lookups: list[Lookup] = []
        self.drains: list[Drain] = []
        self.clears: list[ClearDisk] = []

    def _own(self, first: int, num_pages: int) -> list[int]:
        return [i for i in range(num_pages) if owner_of(first + i, self.num_owners) == self.lane]

    # --- commands -----------------------------------------------------------------------------------------------------

    def submit(self, commands: Sequence[Command]) -> None:
        """Take the commands of a tick, in order."""
        for command in commands:
            match command:
                case Backup() | LoadBack():
                    op = self.core.state.ops.ops[command.op]
                    nodes = self.core.state.tree.nodes_of(op.bottom, op.first)
                    hashes = tuple(h for node in nodes for h in node.hashes)
                    assert len(hashes) == len(command.pages) == len(command.frames) == op.num_pages
                    self._add(command.op, Job(command, hashes, self._own(command.first, len(hashes))), DONE)
                case Spill():
                    job = Job(command, command.hashes, self._own(command.first, len(command.hashes)))
                    job.ages = dict.fromkeys(command.hashes, command.age)
                    self._add(command.gather, job, DONE)
                    if command.gather in self.seen:
                        self.seen[command.durable] = DONE
                case Reload():
                    job = Job(command, command.hashes, self._own(command.first, len(command.hashes)))
                    self._add(command.op, job, 1 + len(command.hashes))
                case Lookup():
                    self.lookups.append(command)
                case Drain():
                    self.drains.append(command)
                case ClearDisk():
                    self.clears.append(command)
                case Touch():
                    self._touch(command)

    def _add(self, op: OpId, job: Job, value_of_nothing: int) -> None:
        if job.todo:
            self.jobs[op] = job
        else:
            self.seen[op] = value_of_nothing

    def _touch(self, touch: Touch) -> None:
        for page in touch.hashes:
            if page in self.disk:
                self.disk[page] = max(self.disk[page], touch.age)
            for job in self.jobs.values():
                if page in job.ages:
                    job.ages[page] = max(job.ages[page], touch.age)

    # --- work ---------------------------------------------------------------------------------------------------------

    def work(self, rng: random.Random, speed: float, failing: float = 0.0) -> None:
        """Every operation gets on a little with probability `speed`; what may fail does with probability `failing`."""
        for op, job in list(self.jobs.items()):
            if rng.random() < speed:
                fails = rng.random() < failing
                match job.command:
                    case Backup():
                        self._copy(op, job, rng, fails)
                    case LoadBack():
                        self._copy(op, job, rng, fails=False)
                    case Spill():
                        self._spill(op, job, fails)
                    case Reload():
                        self._read(op, job, rng, fails)
        for lookup in [x for x in self.lookups if rng.random() < speed]:
            self.lookups.remove(lookup)
            self._look_up(lookup)
        for drain in [x for x in self.drains if x.reload not in self.jobs and rng.random() < speed]:
            self.drains.remove(drain)
            self.seen[drain.op] = DONE
        for clear in [x for x in self.clears if rng.random() < speed]:
            self.clears.remove(clear)
            busy = [j for j in self.jobs.values() if isinstance(j.command, Spill | Reload)]
            assert not busy, "the disk is emptied while something is in flight there"
            assert not self.lookups
            assert not self.drains
            self.disk.clear()
            self.seen[clear.op] = DONE

    def _copy(self, op: OpId, job: Job, rng: random.Random, fails: bool) -> None:
        command = job.command
        assert isinstance(command, Backup | LoadBack)
        for _ in range(rng.randint(1, 8)):
            if not job.todo:
                break
            at = job.todo.pop(rng.randrange(len(job.todo)))
            page, frame = command.pages[at], command.frames[at]
            if isinstance(command, Backup):
                assert self.l1[page] == job.hashes[at], "a backup reads what is not there"
                self.l2[frame] = job.hashes[at]
            else:
                assert self.l2[frame] == job.hashes[at], "a load-back reads what is not there"
                self.l1[page] = job.hashes[at]
        if fails or not job.todo:
            self.seen[op] = FAILED if fails else DONE
            del self.jobs[op]

    def _spill(self, op: OpId, job: Job, fails: bool) -> None:
        command = job.command
        assert isinstance(command, Spill)
        if not job.gathered:
            for at in job.todo:
                assert self.l2[command.frames[at]] == job.hashes[at], "a gather reads what is not there"
            self.seen[op] = FAILED if fails else DONE
            job.gathered = True
            if not fails:
                return
        elif not fails:
            for at in job.todo:
                page = job.hashes[at]
                self.disk[page] = max(self.disk.get(page, 0), job.ages[page])
        self.seen[command.durable] = FAILED if fails else DONE
        del self.jobs[op]

    def _look_up(self, lookup: Lookup) -> None:
        own = self._own(lookup.first, len(lookup.hashes))
        missing = [at for at in own if lookup.hashes[at] not in self.disk]
        self.seen.setdefault(lookup.op, 1 + min(missing, default=len(lookup.hashes)))

    def _read(self, op: OpId, job: Job, rng: random.Random, fails: bool) -> None:
        command = job.command
        assert isinstance(command, Reload)
        for at in [at for at in job.started if rng.random() < 0.7]:
            job.started.remove(at)
            self._demand_of_operation(op, at, command.frames[at])
            self.l2[command.frames[at]] = job.hashes[at]
            job.done.append(at)
        while job.todo and not job.failed and rng.random() < 0.8:
            at = job.todo.pop(0)
            if fails or job.hashes[at] not in self.disk:
                self.l2[command.frames[at]] = GARBAGE
                job.failed = True
            else:
                job.started.append(at)
        if not job.started and (job.failed or not job.todo or job.late):
            if not job.late:
                self.seen[op] = 1 + self._vouched(job)
            del self.jobs[op]

    def _demand_of_operation(self, op: OpId, at: int, frame: int) -> None:
        """A read may only write to a frame that belongs to its reload, or to the drain that follows it."""
        ops = self.core.state.ops.ops.values()
        owner = [x for x in ops if op in (x.id, x.partner) and x.stream in (Stream.RELOAD, Stream.DRAIN)]
        held = [x.frames[i] for x in owner for i in self._own(x.first, x.num_pages)]
        assert frame in held, f"a read of page {at} writes to frame {frame}, which is not its reload's any more"

    def _vouched(self, job: Job) -> int:
        own = self._own(job.command.first, len(job.hashes))
        return min((at for at in own if at not in job.done), default=len(job.hashes))

    def report_now(self, ops: Sequence[OpId]) -> None:
        """Past the deadline: what is verified by now. A read not yet begun is dropped."""
        for op in ops:
            if op in self.seen:
                continue
            if (job := self.jobs.get(op)) is None:
                (lookup,) = [x for x in self.lookups if x.op == op]
                self.lookups.remove(lookup)
                self.seen[op] = 1  # nothing is known yet
                continue
            self.seen[op] = 1 + self._vouched(job)
            job.late, job.todo = True, []
            if not job.started:
                del self.jobs[op]

    # --- memory -------------------------------------------------------------------------------------------------------

    def write(self, run: PageRun, hashes: Sequence[bytes], start: int) -> None:
        """The forward writes the run's pages `start …`."""
        for at in self._own(start, len(hashes)):
            assert self.core.state.l1[self.lane].is_live(run.pages[start + at])
            self.l1[run.pages[start + at]] = hashes[at]

    def poison(self) -> None:
        """Whatever is free holds nothing; what an operation here still reads or writes may not be free."""
        s = self.core.state
        for page in s.l1[self.lane].free_list():
            self.l1[page] = POISON
        for frame in s.l2[self.lane].free_list():
            self.l2[frame] = POISON
        for op, job in self.jobs.items():
            command = job.command
            ends = [] if job.gathered else [*job.todo, *job.started]
            assert all(s.l2[self.lane].is_live(command.frames[at]) for at in ends), f"operation {op}: a frame was freed"
            if isinstance(command, Backup | LoadBack):
                assert all(s.l1[self.lane].is_live(command.pages[at]) for at in ends), f"operation {op}: a page was"

    def check(self) -> None:
        """Every page and frame of the tree that counts holds the right bytes."""
        for node in self.core.state.tree.nodes.values():
            own = self._own(node.first, len(node.hashes))
            if node.l1 is not None and not node.load_back:
                assert all(self.l1[node.l1.pages[at]] == node.hashes[at] for at in own), f"node {node.id} in L1"
            if node.l2 is not None and not node.backup:
                assert all(self.l2[node.l2.pages[at]] == node.hashes[at] for at in own), f"node {node.id} in L2"

    def check_run(self, run: PageRun, hashes: Sequence[bytes]) -> None:
        """A sequence whose load-backs have settled reads right bytes."""
        if not run.load_backs:
            for at in self._own(0, run.num_cached):
                assert self.l1[run.pages[at]] == hashes[at], f"sequence {run.seq_id}: page {at}"
