"""Which operations still owe an answer, and the answers that the scheduler has not fetched yet.

An operation is answered once: later answers are dropped, so a thread that gives up may fail everything it knows of.
No lock is taken: single steps of sets and deques are atomic, and a lock's holder may be made to wait for its turn on
the interpreter for longer than a tick.
"""

import time
from collections import deque

from benthic.kvcache.commands import Completion, OpId


class Outbox:
    """`answer` may be called by any thread; the rest is the scheduler's, and `expect` comes before any answer."""

    def __init__(self) -> None:
        self._open: set[OpId] = set()
        self._done: deque[Completion] = deque()
        self._fetched: list[Completion] = []  # out of `_done`, not yet out of `take`

    @property
    def num_open(self) -> int:
        """Operations without an answer."""
        return len(self._open)

    def expect(self, op: OpId) -> None:
        """This operation has been submitted."""
        self._open.add(op)

    def answer(self, op: OpId, value: int) -> None:
        """Report an operation, unless it has its answer."""
        try:
            self._open.remove(op)  # whoever removes it answers it
        except KeyError:
            return
        self._done.append(Completion(op, value))

    def take(self) -> list[Completion]:
        """The answers since the last call, in the order in which they came."""
        done = self._done
        while done:
            self._fetched.append(done.popleft())
        fetched, self._fetched = self._fetched, []
        return fetched

    def revoke(self, op: OpId) -> int | None:
        """Take the operation out: the value it was answered with but not fetched, None if it was still open.

        Raises KeyError for an operation that is neither.
        """
        try:
            self._open.remove(op)
        except KeyError:
            return self._unfetched(op)
        return None

    def _unfetched(self, op: OpId) -> int:
        for attempt in range(100):  # the answering thread may stand between its two steps
            self._fetched = self.take()
            for i, completion in enumerate(self._fetched):
                if completion.op == op:
                    del self._fetched[i]
                    return completion.value
            time.sleep(0.0001 if attempt else 0)
        raise KeyError(f"operation {op} was never submitted, or its answer has been fetched")
