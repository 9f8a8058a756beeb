"""What the disk's threads count, and the errors that they say at most once a period."""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from benthic.tiers.disk.format import Verdict
from benthic.tiers.disk.retire import errno_name

logger = logging.getLogger(__name__)

LOG_PERIOD_S = 10.0
READ_FAULTS = ("io", "checksum", "foreign", "torn", "length", "overtaken")
_RECENT_PAGES = 32  # the time of a page is a plain mean over so many, then the newest has one part of so many
LEAST_PAGES = 8  # of fewer the first one's latency says more than the rate
RATE_HOLDS_S = 30.0  # after the last page: a disk that hung once would else be thought slow, and so unread, for ever
_KIND = {
    Verdict.EMPTY: "torn",
    Verdict.TORN_HEADER: "torn",
    Verdict.FOREIGN: "foreign",
    Verdict.WRONG_HASH: "foreign",
    Verdict.WRONG_LENGTH: "length",
    Verdict.BAD_PAYLOAD: "checksum",
}


def read_fault(fault: Verdict | OSError) -> str:
    """The name under which a failed read is counted."""
    return "io" if isinstance(fault, OSError) else _KIND[fault]


class Counts:
    """Totals since start, added to by any thread of a store."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._faults: Counter[str] = Counter(dict.fromkeys(READ_FAULTS, 0))
        self._page_s = 0.0
        self._num_recent = 0  # pages in `_page_s`, at most _RECENT_PAGES
        self._last_page_s = 0.0
        self.last_error = ""

    def add(self, name: str, amount: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self._totals[name] += amount

    def add_fault(self, kind: str) -> None:
        """Count a failed read."""
        with self._lock:
            self._faults[kind] += 1

    def page_read(self, num_bytes: int, began_s: float) -> None:
        """Count a page that was read and verified; `began_s`: when its transfer began, on the clock."""
        now = self._clock()
        with self._lock:
            self._totals["reloaded_pages"] += 1
            self._totals["reloaded_bytes"] += num_bytes
            # Reads overlap: a page has cost the time since the page before it, or since it began if that is shorter.
            cost = now - max(began_s, self._last_page_s)
            if now - self._last_page_s >= RATE_HOLDS_S:
                self._num_recent = 0
            self._last_page_s = now
            self._num_recent = min(self._num_recent + 1, _RECENT_PAGES)
            self._page_s += (cost - self._page_s) / self._num_recent

    def __getitem__(self, name: str) -> int:
        return self._totals[name]

    @property
    def us_per_page_read(self) -> int:
        """Recent time a page while reading, in µs; 0: fewer than `LEAST_PAGES` so far, or none for `RATE_HOLDS_S`."""
        # No lock: the scheduler's thread asks in every tick. The time first: with a new one the count is new as well.
        if self._clock() - self._last_page_s >= RATE_HOLDS_S or self._num_recent < LEAST_PAGES:
            return 0
        return max(1, round(self._page_s * 1e6))

    def faults(self) -> dict[str, int]:
        """Failed reads by kind."""
        with self._lock:
            return dict(self._faults)


class ErrorLog:
    """Says an error at most once a period, with the number of those it kept to itself. Used by the keeper's thread."""

    def __init__(self, path: str, counts: Counts, clock: Callable[[], float]) -> None:
        self._path = path
        self._counts = counts
        self._clock = clock
        self._next_s: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def say(self, what: str, error: OSError | str) -> None:
        """Note that `what` ("write of slot 3") has failed."""
        text = errno_name(error) if isinstance(error, OSError) else error
        kind = what.split(" ", 1)[0]
        self._counts.last_error = f"{self._path}: {what}: {text}"
        now = self._clock()
        if now < self._next_s.get(kind, now):
            self._unsaid[kind] += 1
            return
        self._next_s[kind] = now + LOG_PERIOD_S
        unsaid = self._unsaid.pop(kind, 0)
        more = f" (and {unsaid} more of the kind since the last message)" if unsaid else ""
        logger.warning("%s: %s: %s%s", self._path, what, text, more)
