"""Copies between L1 and L2, group of layers by group, beside the forward passes whose pages they move.

    backup      reads a group's pages when the step behind it has computed the group's layers
    load-back   writes pages when the step launched before it has ended; a later step waits for it, group by group

Two threads, one a direction, so that a load-back never stands behind a backup whose step has not run. What a copy is,
and how it waits on a device, is the mover's: `cpu_copies` copies, `cuda_copies` queues copies on streams.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benthic.common.layout import ceil_div
from benthic.forward import LayerHooks
from benthic.kvcache.commands import DONE, FAILED, Completion, OpId
from benthic.tiers.host.progress import Mark, Progress, StepFailed

MAX_GROUPS = 4
"""Each costs a call a page (2 µs). A forward may start when a group is there, a quarter of the load-back."""


class StepHooks(LayerHooks, Protocol):
    """Hooks of one step, of the engine that made them; good for this step alone."""


class CopyEngine(Protocol):
    """Carries out this rank's part of backups and load-backs. `pages` and `frames` are this rank's own, pairwise."""

    num_groups: int

    def step_hooks(self, loadbacks: Sequence[OpId]) -> StepHooks:
        """Hooks for the step about to be submitted, whose forward waits for these load-backs and for no others.

        The load-backs must have been given before; those whose completion was polled are done and cost nothing.
        """

    def backup(self, op: OpId, pages: Sequence[int], frames: Sequence[int], after: StepHooks) -> None:
        """L1 → L2, each group of layers when the step of `after` has computed it. Older pages may be among them."""

    def load_back(
        self, op: OpId, frames: Sequence[int], pages: Sequence[int], after: StepHooks | None, *, waited: bool = False
    ) -> None:
        """L2 → L1, when the step of `after`, the last one launched before, has ended. None: no step was launched.

        `waited`: a forward stands on it at once, so the layers go group by group; else in one piece a page, which is a
        fifth faster.
        """

    def poll(self) -> list[Completion]:
        """What has finished since the last call. Cheap; never blocks. Raises the error of a load-back that failed."""

    def close(self) -> None:
        """End the threads when what was given is done. Call after the runner is closed."""


class Mover(Protocol):
    """Moves pages of a group of layers; layers are numbered as the model's."""

    def stream(self) -> object:
        """The stream that the calling thread queues its work on."""

    def mark(self, stream: object) -> Mark:
        """The point behind everything that the stream has queued so far."""

    def hold(self, stream: object, mark: Mark) -> None:
        """What the stream gets from now on waits for the mark."""

    def reached(self, mark: Mark) -> bool:
        """Whether the device has come to the mark. Never blocks."""

    def start_thread(self) -> None:
        """Called on each copying thread before its first copy."""

    def backup(self, pages: Sequence[int], frames: Sequence[int], layers: range, after: Mark) -> Mark:
        """Copy to the frames what is in the pages once `after` is reached; the mark behind the copy."""

    def load_back(self, frames: Sequence[int], pages: Sequence[int], layers: range, after: Mark) -> Mark:
        """Copy to the pages; otherwise as `backup`. `after` None: at once."""

    def close(self) -> None:
        """Wait for what is under way and let go of the streams."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """An operation on its way. `after`: the step that it waits for, wholly or group by group."""

    op: OpId
    pages: tuple[int, ...]
    frames: tuple[int, ...]
    after: Progress | None
    copied: Progress  # of a load-back; nobody waits for a backup's
    in_groups: bool = True


@dataclass(frozen=True, slots=True)
class _Finished:
    op: OpId
    value: int
    mark: Mark  # None: nothing is under way


class LayeredCopies:
    """Implements CopyEngine over a mover. Owns the two threads and every operation until its completion is polled."""

    def __init__(self, mover: Mover, num_layers: int, num_groups: int = MAX_GROUPS) -> None:
        size = ceil_div(num_layers, min(num_groups, num_layers))
        self._groups = tuple(range(first, min(first + size, num_layers)) for first in range(0, num_layers, size))
        self.num_groups = len(self._groups)
        self.last_backup_error = ""  # what the latest failed backup met; how many failed is the core's to count
        self._mover = mover
        self._loadbacks: dict[OpId, Progress] = {}
        self._steps: weakref.WeakSet[Progress] = weakref.WeakSet()  # those that somebody may still wait for
        self._error: BaseException | None = None
        self._done_backups: deque[_Finished] = deque()
        self._done_loadbacks: deque[_Finished] = deque()
        self._backups: _Queue = queue.SimpleQueue()
        self._queued_loadbacks: _Queue = queue.SimpleQueue()
        self._threads = (
            threading.Thread(target=self._run_backups, name="l2-backup", daemon=True),
            threading.Thread(target=self._run_loadbacks, name="l2-load-back", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    def step_hooks(self, loadbacks: Sequence[OpId]) -> "_Step":
        """See CopyEngine."""
        waits = [self._loadbacks[op] for op in loadbacks if op in self._loadbacks]
        step = _Step(self._mover, self._groups, waits)
        self._steps.add(step.computed)
        return step

    def backup(self, op: OpId, pages: Sequence[int], frames: Sequence[int], after: StepHooks) -> None:
        """See CopyEngine."""
        assert isinstance(after, _Step)
        assert len(pages) == len(frames)
        self._backups.put(_Copy(op, tuple(pages), tuple(frames), after.computed, Progress(self.num_groups)))

    def load_back(
        self, op: OpId, frames: Sequence[int], pages: Sequence[int], after: StepHooks | None, *, waited: bool = False
    ) -> None:
        """See CopyEngine."""
        assert after is None or isinstance(after, _Step)
        assert len(pages) == len(frames)
        assert op not in self._loadbacks
        copied = self._loadbacks[op] = Progress(self.num_groups)
        before = None if after is None else after.computed
        self._queued_loadbacks.put(_Copy(op, tuple(pages), tuple(frames), before, copied, waited))

    def poll(self) -> list[Completion]:
        """See CopyEngine. Looks at the oldest operation of each direction first: streams end their work in order."""
        if self._error is not None:
            raise self._error
        completions = []
        for finished in (self._done_backups, self._done_loadbacks):
            while finished and (finished[0].mark is None or self._mover.reached(finished[0].mark)):
                done = finished.popleft()
                self._loadbacks.pop(done.op, None)
                completions.append(Completion(done.op, done.value))
        return completions

    def close(self) -> None:
        """See CopyEngine."""
        for step in tuple(self._steps):  # one that never came to the runner would be waited for in vain
            step.fail(StepFailed("the copies were closed before the step ran"))
        self._backups.put(None)
        self._queued_loadbacks.put(None)
        for thread in self._threads:
            thread.join()
        self._mover.close()

    def _run_backups(self) -> None:
        self._mover.start_thread()
        for batch in _batches(self._backups):
            mark: Mark = None
            value = DONE
            try:
                for queued in self._back_up(batch):
                    mark = queued  # a failure later on waits for this one
            except Exception as error:  # noqa: BLE001  # a step that failed, or the device: the core drops the frames
                self.last_backup_error = f"{type(error).__name__}: {error}"
                value = FAILED
            self._done_backups.extend(_Finished(copy.op, value, mark) for copy in batch)

    def _back_up(self, batch: Sequence[_Copy]) -> Iterator[Mark]:
        """Queue the copies of a batch, group by group; yields the mark behind each."""
        after, (pages, frames) = batch[0].after, _together(batch)
        assert after is not None
        group = 0
        while group < self.num_groups:
            marks = after.wait(group)
            count = self._ready_at_once(marks)
            layers = range(self._groups[group].start, self._groups[group + count - 1].stop)
            yield self._mover.backup(pages, frames, layers, marks[count - 1])
            group += count

    def _ready_at_once(self, marks: tuple[Mark, ...]) -> int:
        """How many groups to copy in one piece: those that were computed together, or are all computed by now."""
        count = 1
        while count < len(marks) and (marks[count] is marks[count - 1] or self._mover.reached(marks[count])):
            count += 1
        return count

    def _run_loadbacks(self) -> None:
        self._mover.start_thread()
        for batch in _batches(self._queued_loadbacks):
            try:
                mark = self._load_back(batch)
            except Exception as error:  # noqa: BLE001  # raised by `poll`, and by the forward that stands on it
                self._error = error
                for copy in batch:
                    copy.copied.fail(error)
            else:
                self._done_loadbacks.extend(_Finished(copy.op, DONE, mark) for copy in batch)

    def _load_back(self, batch: Sequence[_Copy]) -> Mark:
        after, (pages, frames) = batch[0].after, _together(batch)
        before = None if after is None else after.wait_for_end()
        mark: Mark = None
        if not batch[0].in_groups:
            mark = self._mover.load_back(frames, pages, range(self._groups[-1].stop), before)
        for layers in self._groups if batch[0].in_groups else ():
            mark = self._mover.load_back(frames, pages, layers, before)
            for copy in batch:
                copy.copied.reach(mark)
        for copy in batch:
            copy.copied.finish(mark)
        return mark


_Queue = queue.SimpleQueue[_Copy | None]


def _batches(tasks: _Queue) -> Iterator[list[_Copy]]:
    """What waits in the queue for the same step, as one piece: so everybody's first group comes before any second.

    Ends when None comes.
    """
    batch: list[_Copy] = []
    while True:
        task = tasks.get()
        if batch and (task is None or not _alike(task, batch[0])):
            yield batch
            batch = []
        if task is None:
            return
        batch.append(task)
        if tasks.empty():  # no other thread takes
            yield batch
            batch = []


def _alike(one: _Copy, other: _Copy) -> bool:
    """Whether two operations can go as one piece."""
    return one.after is other.after and one.in_groups == other.in_groups


def _together(batch: Sequence[_Copy]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pages and frames of all."""
    return tuple(p for copy in batch for p in copy.pages), tuple(f for copy in batch for f in copy.frames)


class _Step:
    """Hooks of one step. `computed`: how far its forward is."""

    def __init__(self, mover: Mover, groups: tuple[range, ...], waits: Sequence[Progress]) -> None:
        self.computed = Progress(len(groups))
        self._mover = mover
        self._waits = waits
        self._stream: object = None
        self._begins = {layers.start: group for group, layers in enumerate(groups)}
        self._ends = frozenset(layers.stop - 1 for layers in groups)

    def begin(self) -> None:
        """See LayerHooks."""
        self._stream = self._mover.stream()

    def before_layer(self, index: int) -> None:
        """See LayerHooks."""
        group = self._begins.get(index)
        if group is not None:
            for copied in self._waits:
                self._mover.hold(self._stream, copied.wait(group)[0])

    def after_layer(self, index: int) -> None:
        """See LayerHooks."""
        if index in self._ends:
            self.computed.reach(self._mover.mark(self._stream))

    def before_all(self) -> None:
        """See LayerHooks."""
        for copied in self._waits:
            self._mover.hold(self._stream, copied.wait(len(self._begins) - 1)[0])

    def after_all(self) -> None:
        """See LayerHooks."""
        self.computed.reach(self._mover.mark(self._stream), len(self._begins))

    def end(self, failed: bool) -> None:
        """See LayerHooks."""
        self._waits = ()  # else each step would keep alive all before it
        try:
            mark = None if self._stream is None else self._mover.mark(self._stream)
        except BaseException as error:
            self.computed.fail(error)
            raise
        if failed:
            self.computed.fail(StepFailed("the step failed before it had computed these layers"), mark)
        else:
            self.computed.finish(mark)
