"""Prometheus series of one server: work that the server counts itself, and the engine's own totals, about once a
second.

Nothing is read back from here. Counters are totals since start and never fall; a flush of the cache changes gauges
only.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from benthic.messages import Stats
from benthic.observability.rank_disks import RankDisks
from benthic.observability.tier_series import tier_families

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_GAP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2, 5)
TIERS = ("l1", "l2", "l3")


class Metrics:
    """Owns the registry. Every method is cheap and never fails a request.

    `disks` are those of the ranks that send no `Stats`; all other totals of the engine come from its first rank alone,
    so that a sum over series counts nothing twice.
    """

    def __init__(self, disks: RankDisks | None = None) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._prompt = Counter("benthic_prompt_tokens", "Prompt tokens of started requests", registry=registry)
        self._cached = Counter(
            "benthic_cached_tokens", "Prompt tokens whose KV came from the cache", ["tier"], registry=registry
        )
        self._generated = Counter("benthic_generated_tokens", "Generated tokens that clients got", registry=registry)
        self._finished = Counter(
            "benthic_requests", "Choices that ended, by reason", ["finish_reason"], registry=registry
        )
        self._refused = Counter(
            "benthic_refused_requests", "Requests answered with an error status", ["status"], registry=registry
        )
        self._first = _histogram("time_to_first_token", "Arrival to the first token", registry)
        self._gap = _histogram("inter_token_latency", "Between two tokens of a choice", registry, _GAP_SECONDS)
        self._e2e = _histogram("e2e_latency", "Arrival to the last token", registry)
        self._queue = _histogram("queue_time", "The engine's receipt to admission", registry)
        self._ready = Gauge("benthic_ready", "1 when the server takes requests", registry=registry)
        for tier in TIERS:
            self._cached.labels(tier)
        self._stats = StatsCollector(disks or RankDisks())
        registry.register(self._stats)

    def render(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)

    def update(self, stats: Stats) -> None:
        """Take the engine's newest totals."""
        self._stats.stats = stats

    def set_ready(self, ready: bool) -> None:
        """Whether requests are taken."""
        self._ready.set(ready)

    def count_prompt(self, num_tokens: int, *, cached_l1: int, cached_l2: int = 0, cached_l3: int = 0) -> None:
        """A prompt's first choice was admitted; each cached token counts in the tier that it was found in."""
        self._prompt.inc(num_tokens)
        for tier, cached in zip(TIERS, (cached_l1, cached_l2, cached_l3), strict=True):
            self._cached.labels(tier).inc(cached)

    def count_generated(self, num_tokens: int) -> None:
        """Tokens that count for a client's usage."""
        self._generated.inc(num_tokens)

    def count_finish(self, reason: str) -> None:
        """A choice ended: stop, length, abort (the client went away) or error."""
        self._finished.labels(reason).inc()

    def count_refused(self, status: int) -> None:
        """A request got an error status."""
        self._refused.labels(str(status)).inc()

    def observe_queue(self, seconds: float) -> None:
        """Time in the engine's queue."""
        self._queue.observe(seconds)

    def observe_first(self, seconds: float) -> None:
        """Time to first token."""
        self._first.observe(seconds)

    def observe_gap(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` tokens came together, `seconds` after the one before them."""
        for _ in range(num_tokens):
            self._gap.observe(seconds / num_tokens)

    def observe_end(self, seconds: float) -> None:
        """A whole request, from arrival to its last token."""
        self._e2e.observe(seconds)


class StatsCollector(Collector):
    """The engine's last `Stats` as series; empty until the first arrives."""

    def __init__(self, disks: RankDisks) -> None:
        self.stats: Stats | None = None
        self._disks = disks

    def collect(self) -> Iterable[Metric]:
        """All families. Called by a scrape."""
        stats = self.stats
        if stats is None:
            return
        yield GaugeMetricFamily("benthic_requests_running", "Requests in the batch", value=stats.running)
        yield GaugeMetricFamily("benthic_requests_waiting", "Requests that wait for admission", value=stats.waiting)
        yield GaugeMetricFamily("benthic_requests_held", "Requests that wait for a reload", value=stats.held)
        for name, text, value in (
            ("preemptions", "Running requests sent back to the queue", stats.preemptions),
            ("evicted_pages", "Cached pages dropped from L1 to make room", stats.evicted_pages),
            ("ticks", "Turns of the scheduler that launched work", stats.ticks),
            ("slow_ticks", "Ticks with more than 100 ms of host time", stats.slow_ticks),
            ("tick_busy_seconds", "Seconds with a forward pass under way", stats.busy_s),
            ("tick_host_seconds", "Scheduler seconds in ticks that launched work", stats.host_s),
            ("tick_tiers_seconds", "Scheduler seconds spent on L2 and L3", stats.tick_tiers_s),
        ):
            yield CounterMetricFamily(f"benthic_{name}", text, value=value)
        yield from tier_families(stats, self._disks.beside(stats.disks))


def _histogram(name: str, text: str, registry: CollectorRegistry, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
    return Histogram(f"benthic_{name}_seconds", text, buckets=buckets, registry=registry)
