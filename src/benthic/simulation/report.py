"""What a replay found: totals, a series over the trace's time, and the host's time a tick."""

from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

from benthic.kvcache import Counters

TIERS = ("l1", "l2", "l3")
NUM_BUCKETS = 100  # of the series, over the arrivals
LEAST_BUCKET_US = 1_000_000  # the last answer may end long after the last arrival


@dataclass(slots=True)
class Bucket:
    """One stretch of the trace's time: pages of the prompts admitted in it, where they were found, what was evicted."""

    start_s: float
    pages: int = 0
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    evicted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))


class Series:
    """Owns the buckets while a replay runs."""

    def __init__(self, arrivals_us: int) -> None:
        self.width_us = max(LEAST_BUCKET_US, arrivals_us // NUM_BUCKETS + 1)
        self.buckets: list[Bucket] = []
        self._evicted = dict.fromkeys(TIERS, 0)

    def admitted(self, now_us: int, pages: int, found: dict[str, int]) -> None:
        """A request has started."""
        bucket = self._at(now_us)
        bucket.pages += pages
        for tier in TIERS:
            bucket.found[tier] += found[tier]

    def evicted(self, now_us: int, totals: dict[str, int]) -> None:
        """`totals` have been evicted since the start."""
        if totals != self._evicted:
            bucket = self._at(now_us)
            for tier in TIERS:
                bucket.evicted[tier] += totals[tier] - self._evicted[tier]
            self._evicted = totals

    def _at(self, now_us: int) -> Bucket:
        index = now_us // self.width_us
        while len(self.buckets) <= index:
            self.buckets.append(Bucket(len(self.buckets) * self.width_us / 1e6))
        return self.buckets[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class TickTimes:
    """CPU time of the host spent in the core a tick, in µs."""

    count: int
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: "array[float]") -> "TickTimes":
        """Of one entry a tick, at least one."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(
            count=len(ordered),
            median=ordered[last // 2] * 1e6,
            p99=ordered[last * 99 // 100] * 1e6,
            max=ordered[last] * 1e6,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a replay; pages are those of the prompts of requests that were not refused."""

    num_requests: int
    num_refused: int  # longer than L1
    num_pages: int
    found: dict[str, int]  # pages, by the tier in which they were found
    evicted: dict[str, int]  # pages; of L3: collected
    counters: Counters
    l3_pages: int  # on disk at the end
    trace_s: float  # simulated, to the last answer
    tick_us: TickTimes
    buckets: tuple[Bucket, ...]
    bucket_s: float

    def share(self, tier: str) -> float:
        """Pages found in the tier, of all pages."""
        return self.found[tier] / self.num_pages if self.num_pages else 0.0

    @property
    def hit_share(self) -> float:
        """Pages found in any tier, of all pages."""
        return sum(self.found.values()) / self.num_pages if self.num_pages else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the series."""
        return {
            "requests": self.num_requests,
            "refused_requests": self.num_refused,
            "input_pages": self.num_pages,
            "found_pages": self.found,
            "hit_share": self.hit_share,
            "hit_share_by_tier": {tier: self.share(tier) for tier in TIERS},
            "evicted_pages": self.evicted,
            "counters": asdict(self.counters),
            "l3_pages": self.l3_pages,
            "trace_s": self.trace_s,
            "tick_us": asdict(self.tick_us),
        }
