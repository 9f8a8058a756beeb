"""A simulated link or disk: one transfer at a time, at a fixed rate, in the order in which they came."""

from collections import deque
from dataclasses import dataclass

from benthic.kvcache import OpId


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages to be moved for one operation; owned by its channel."""

    op: OpId
    num_pages: int


class Channel:
    """Owns its queue. Times are µs of the simulated clock; callers never go back in it."""

    def __init__(self, us_per_page: int, latency_us: int = 0) -> None:
        self._us_per_page = us_per_page
        self._latency_us = latency_us  # of each transfer
        self._first: deque[Transfer] = deque()
        self._later: deque[Transfer] = deque()
        self._current: Transfer | None = None
        self._start_us = 0  # of the current one

    def submit(self, op: OpId, num_pages: int, now_us: int, *, first: bool = False) -> None:
        """Queue a transfer; `first`: before all that are not (reads before writes)."""
        (self._first if first else self._later).append(Transfer(op, num_pages))
        if self._current is None:
            self._begin(now_us)

    def next_end_us(self) -> int | None:
        """When the current transfer ends; None when idle."""
        return None if self._current is None else self._end_us(self._current)

    def take_done(self, now_us: int) -> list[OpId]:
        """Operations whose transfers have ended by `now_us`, in that order."""
        done = []
        while self._current is not None and (end_us := self._end_us(self._current)) <= now_us:
            done.append(self._current.op)
            self._begin(end_us)
        return done

    def cut(self, op: OpId, now_us: int) -> tuple[int, bool]:
        """Begin no further page of a transfer: (pages moved by now, whether one is still under way)."""
        current = self._current
        if current is None or current.op != op:
            for queue in (self._first, self._later):
                for waiting in queue:
                    if waiting.op == op:
                        queue.remove(waiting)
                        return 0, False
            raise ValueError(f"operation {op} has no transfer under way")
        moved = max(0, now_us - self._start_us - self._latency_us) // self._us_per_page
        moved = min(moved, current.num_pages)
        current.num_pages = min(moved + 1, current.num_pages)
        return moved, True

    def _end_us(self, transfer: Transfer) -> int:
        return self._start_us + self._latency_us + transfer.num_pages * self._us_per_page

    def _begin(self, at_us: int) -> None:
        queue = self._first or self._later
        self._current = queue.popleft() if queue else None
        self._start_us = at_us
