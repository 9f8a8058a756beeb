"""The reads that wait and those under way, by reload: whose turn it is, and how far each reload has come.

Reloads take turns page by page, so a small one does not wait behind a large one. A reload's answer is the position of
its first own page that is not verified; pages behind a failed one are not read. `settle_now` answers at the deadline:
what has not begun then never begins, and what is under way is waited for by `drain`.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benthic.kvcache.commands import DONE, OpId
from benthic.tiers.disk.jobs import PageRead
from benthic.tiers.disk.outbox import Outbox


@dataclass(slots=True, eq=False)
class _Reload:
    op: OpId
    own: range  # the positions that this rank owns
    limit: int  # position of the first page that can't be had; the operation's length so far
    waiting: deque[PageRead] = field(default_factory=deque)
    verified: set[int] = field(default_factory=set)
    planned: bool = False
    reading: int = 0  # transfers under way into this reload's frames
    judging: int = 0  # failed reads that the keeper has not dealt with yet
    settled: bool = False
    drains: list[OpId] = field(default_factory=list)

    @property
    def at_rest(self) -> bool:
        return self.planned and not (self.waiting or self.reading or self.judging)

    def count(self) -> int:
        """1 + the position of the first own page that is not verified, else the length."""
        for i in self.own:
            if i >= self.limit:
                break
            if i not in self.verified:
                return 1 + i
        return 1 + self.limit

    def cut(self, position: int) -> None:
        """The page at `position` can't be had: what lies behind it is of no use."""
        self.limit = min(self.limit, position)
        if self.waiting and self.waiting[-1].position >= self.limit:
            self.waiting = deque(read for read in self.waiting if read.position < self.limit)


class ReadQueue:
    """Shared by the scheduler's thread, the keeper and the readers; one lock, which `open` alone does without."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)
        self._reloads: dict[OpId, _Reload] = {}
        self._turns: deque[_Reload] = deque()  # those with a read that waits
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Reads that have not begun."""
        with self._lock:
            return sum(len(reload.waiting) for reload in self._turns)

    @property
    def num_running(self) -> int:
        """Reads under way."""
        with self._lock:
            return sum(reload.reading for reload in list(self._reloads.values()))

    def open(self, op: OpId, own: range, length: int) -> None:
        """A reload has been submitted; nothing is read before `plan`. No lock: the scheduler's thread calls this."""
        self._reloads[op] = _Reload(op, own, length)

    def plan(self, op: OpId, reads: Sequence[PageRead], missing: int | None) -> None:
        """The keeper has found the pages, up to the first that is `missing`; in the order of their positions."""
        with self._lock:
            reload = self._reloads.get(op)
            if reload is None or reload.settled or reload.planned:
                return
            reload.planned = True
            if missing is not None:
                reload.limit = missing
            if reads and not self._closed:
                reload.waiting.extend(reads)
                self._turns.append(reload)
                self._work.notify(len(reads))
            elif reads:
                reload.limit = min(reload.limit, reads[0].position)
            self._finish(reload)

    def next(self) -> tuple[OpId, PageRead] | None:
        """Wait for the next read and count it as under way; None when the queue is closed."""
        with self._lock:
            while True:
                while self._turns:
                    reload = self._turns.popleft()
                    if reload.waiting:
                        read = reload.waiting.popleft()
                        reload.reading += 1
                        if reload.waiting:
                            self._turns.append(reload)
                        if not self._turns:
                            self._quiet.notify_all()
                        return reload.op, read
                self._quiet.notify_all()
                if self._closed:
                    return None
                self._work.wait()

    def verified(self, op: OpId, read: PageRead) -> None:
        """The page is in its frame and is what it should be."""
        with self._lock:
            reload = self._reloads[op]
            reload.reading -= 1
            reload.verified.add(read.position)
            self._finish(reload)

    def failed(self, op: OpId, read: PageRead) -> None:
        """The transfer is over and brought nothing; the reload is not reported before the keeper has said `judged`."""
        with self._lock:
            reload = self._reloads[op]
            reload.reading -= 1
            reload.judging += 1
            reload.cut(read.position)
            self._finish(reload)

    def judged(self, op: OpId) -> None:
        """The keeper has dealt with a failed read."""
        with self._lock:
            reload = self._reloads.get(op)
            if reload is not None:
                reload.judging -= 1
                self._finish(reload)

    def settle_now(self, op: OpId) -> int | None:
        """The answer as of now, for the deadline; no read of this reload begins any more. 1 + n.

        None if the reload has been answered already.
        """
        with self._lock:
            reload = self._reloads.get(op)
            if reload is None or reload.settled:
                return None
            answer = reload.count()
            reload.settled = True
            reload.waiting.clear()
            self._finish(reload)
            return answer

    def drain(self, op: OpId, drain: OpId) -> None:
        """Report `drain` when no transfer touches the frames of reload `op`; at once where none does."""
        with self._lock:
            reload = self._reloads.get(op)
            if reload is None or not reload.reading:
                self._outbox.answer(drain, DONE)
            else:
                reload.drains.append(drain)

    def let_reads_go_first(self, patience_s: float) -> None:
        """Wait, as a writer, while reads wait for their turn; not for ever, since a disk may hang on reads alone."""
        if self._turns:  # without the lock: a write too early does no harm
            with self._lock:
                self._quiet.wait_for(lambda: not self._turns or self._closed, patience_s)

    def close(self) -> None:
        """No read begins any more; `next` answers None."""
        with self._lock:
            self._closed = True
            for reload in self._turns:
                if reload.waiting:
                    reload.cut(reload.waiting[0].position)
                self._finish(reload)
            self._turns.clear()
            self._work.notify_all()
            self._quiet.notify_all()

    def _finish(self, reload: _Reload) -> None:
        if reload.drains and not reload.reading:
            for drain in reload.drains:
                self._outbox.answer(drain, DONE)
            reload.drains.clear()
        if reload.settled:
            if not (reload.reading or reload.judging):
                self._reloads.pop(reload.op, None)
        elif reload.at_rest:
            self._outbox.answer(reload.op, reload.count())
            del self._reloads[reload.op]
