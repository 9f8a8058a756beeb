"""This rank's workers below L1, behind one door: commands of the core in, completions out.

Rank-local: what is known here no other rank knows, until `agree` has made it known to all.
"""

from collections.abc import Sequence
from typing import Protocol

from benthic.common.layout import ceil_div, owner_of
from benthic.forward import LayerHooks
from benthic.kvcache.commands import (
    DONE,
    Backup,
    ClearDisk,
    Command,
    Drain,
    LoadBack,
    Lookup,
    OpId,
    Reload,
    Spill,
    Touch,
)
from benthic.messages.tiers import DiskStats
from benthic.tiers.host.copies import CopyEngine, StepHooks

DiskCommand = Spill | Lookup | Reload | Drain | ClearDisk | Touch


class Disk(Protocol):
    """What is used of `tiers.disk.store.DiskStore`; tests put slow and faulty ones here."""

    def submit(self, command: DiskCommand) -> None: ...
    def poll(self) -> Sequence["HasCompletion"]: ...
    def report_now(self, op: OpId) -> int: ...
    def stats(self) -> DiskStats: ...
    @property
    def us_per_page_read(self) -> int: ...
    def close(self, finish_by_s: float) -> bool: ...


class HasCompletion(Protocol):
    """A completion: which operation, and its value."""

    @property
    def op(self) -> OpId: ...
    @property
    def value(self) -> int: ...


class Closes(Protocol):
    """The host slabs, as far as they concern us."""

    def close(self) -> None: ...


class TierWorkers:
    """Owns the copy engine, the disk store and what they have reported and the ranks have not agreed on yet."""

    def __init__(
        self,
        *,
        rank: int = 0,
        num_owners: int = 1,
        copies: CopyEngine | None = None,
        disk: Disk | None = None,
        slabs: Closes | None = None,
    ) -> None:
        self.seen: dict[OpId, int] = {}
        self.rank = rank
        self._num_owners = num_owners
        self._copies = copies
        self._disk = disk
        self._slabs = slabs
        self._last_step: StepHooks | None = None  # of the last forward launched: copies wait for its end

    def submit(self, commands: Sequence[Command], waited: Sequence[OpId] = ()) -> None:
        """Hand commands on, in order. Cheap: queues only. `waited`: load-backs that the next forward stands on."""
        for command in commands:
            match command:
                case Backup() | LoadBack():
                    self._copy(command, waited)
                case _:
                    assert self._disk is not None
                    self._disk.submit(command)

    def _copy(self, command: Backup | LoadBack, waited: Sequence[OpId]) -> None:
        pages, frames = command.pages, command.frames
        if self._num_owners > 1:
            own = [i for i in range(len(pages)) if owner_of(command.first + i, self._num_owners) == self.rank]
            pages, frames = tuple(pages[i] for i in own), tuple(frames[i] for i in own)
        if not pages:
            self.seen[command.op] = DONE  # in lockstep with the ranks that have work
            return
        assert self._copies is not None
        if isinstance(command, LoadBack):
            self._copies.load_back(command.op, frames, pages, self._last_step, waited=command.op in waited)
        else:
            assert self._last_step is not None
            self._copies.backup(command.op, pages, frames, self._last_step)

    def step_hooks(self, load_backs: Sequence[OpId]) -> LayerHooks | None:
        """Hooks for the step about to be launched; its forward waits for these load-backs, given before."""
        if self._copies is None:
            return None
        self._last_step = self._copies.step_hooks(load_backs)
        return self._last_step

    def poll(self) -> None:
        """Add what has finished to `seen`. Never blocks. Raises the error of a load-back that failed."""
        if self._copies is not None:
            self.seen.update((c.op, c.value) for c in self._copies.poll())
        if self._disk is not None:
            self.seen.update((c.op, c.value) for c in self._disk.poll())

    def report_now(self, overdue: Sequence[OpId]) -> None:
        """Answer for operations past their deadline with what is there by now."""
        for op in overdue:
            if op not in self.seen and self._disk is not None:
                self.seen[op] = self._disk.report_now(op)

    def forget(self, settled: Sequence[OpId]) -> None:
        """The ranks have agreed on these."""
        for op in settled:
            self.seen.pop(op, None)

    def disk_stats(self) -> tuple[DiskStats, ...]:
        """The disk's counters and gauges, if there is one."""
        return () if self._disk is None else (self._disk.stats(),)

    @property
    def read_us_per_page(self) -> int:
        """Recent time a page of a sequence, whose pages all owners read side by side; 0: not known."""
        return 0 if self._disk is None else ceil_div(self._disk.us_per_page_read, self._num_owners)

    def close(self, finish_by_s: float = 0.0) -> bool:
        """End the threads; the disk may take so long to make durable what it was given. The runner is closed before.

        False: a disk hangs, and its threads with it.
        """
        ended = True
        if self._copies is not None:
            self._copies.close()
        if self._disk is not None:
            ended = self._disk.close(finish_by_s)
        if self._slabs is not None:
            self._slabs.close()
        return ended
