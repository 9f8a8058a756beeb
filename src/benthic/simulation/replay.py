"""The replay: a scheduler reduced to admission, the real cache core, simulated workers, and the trace's clock.

The one thing to know: nothing is computed, so a request's pages enter the tree in the tick of its admission, where a
real one launches its chunks one after another; its answer ends after the simulated time of its prefill and decode.
Room for the answer is taken at admission, so nothing is ever preempted.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from benthic.common.layout import ceil_div, owner_counts
from benthic.kvcache import CacheCore, CoreConfig, Found, Hold, PageRun, agree
from benthic.simulation.report import TIERS, Report, Series, TickTimes
from benthic.simulation.setup import Setup
from benthic.simulation.trace import Trace, TraceRequest
from benthic.simulation.workers import Workers

STAGING_FRAMES = 64  # of each lane; a spill takes 32 at most
BUSY_TICK_US = 100_000  # ticks come at least so often while something is in flight: time bounds are noticed by a tick


@dataclass(slots=True, eq=False)
class _Waiting:
    seq_id: int
    request: TraceRequest
    hold: Hold | None


def replay(
    trace: Trace,
    setup: Setup,
    clock: Callable[[], float] = time.thread_time,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Run the whole trace through a new core.

    `clock` times the ticks in seconds: CPU time, so that what else the machine does is not in it. `on_progress` is told
    how many requests have been answered or refused.
    """
    replayed = Replay(trace, setup, clock)
    while not replayed.done:
        replayed.step()
        on_progress(replayed.num_done)
    return replayed.report()


class Replay:
    """Owns the core, the queue and the running requests of one replay."""

    def __init__(self, trace: Trace, setup: Setup, clock: Callable[[], float] = time.thread_time) -> None:
        self.core = CacheCore(core_config(trace, setup))
        self.workers = Workers(setup)
        self.found = dict.fromkeys(TIERS, 0)
        self.num_done = self.num_refused = 0
        self._trace, self._setup, self._clock = trace, setup, clock
        self._arrivals = [round(request.arrival_us / setup.speed) for request in trace.requests]
        self._series = Series(self._arrivals[-1])
        self._num_arrived = self._num_pages = 0
        self._waiting: list[_Waiting] = []  # by arrival
        self._loading: list[tuple[PageRun, int]] = []  # (run, µs from its load-back's end to its last token)
        self._running: list[tuple[int, int, PageRun]] = []  # heap of (end, sequence, run)
        self._tick, self._now_us = 0, 0
        self._tick_s = array("d")

    @property
    def done(self) -> bool:
        """All requests are answered or refused."""
        return self.num_done == len(self._arrivals)

    def step(self) -> None:
        """One tick, then forward to the time of the next."""
        now_us = self._now_us
        workers, core = self.workers, self.core
        workers.advance(now_us)
        workers.report_now(core.overdue(now_us), now_us)
        started = self._clock()
        self._run_tick(now_us)
        commands = core.take_commands()
        self._tick_s.append(self._clock() - started)
        workers.submit(commands, now_us)
        self._series.evicted(now_us, self._evicted())
        if not self.done:
            self._now_us = max(now_us + self._setup.tick_us, self._next_us())

    def report(self) -> Report:
        """What was found so far."""
        floor = self.workers.floor
        return Report(
            num_requests=self.num_done - self.num_refused,
            num_refused=self.num_refused,
            num_pages=self._num_pages,
            found=dict(self.found),
            evicted=self._evicted(),
            counters=replace(self.core.counters),
            l3_pages=floor.num_pages if floor else 0,
            trace_s=self._now_us / 1e6,
            tick_us=TickTimes.of(self._tick_s),
            buckets=tuple(self._series.buckets),
            bucket_s=self._series.width_us / 1e6,
        )

    # --- the tick -----------------------------------------------------------------------------------------------------

    def _run_tick(self, now_us: int) -> None:
        core, setup, seen = self.core, self._setup, self.workers.seen
        self._tick += 1
        agreed = agree(core.windows(), seen, _of_one_rank)
        for end in agreed:
            del seen[end.op]
        core.begin_tick(
            self._tick,
            now_us,
            agreed,
            read_us_per_page=ceil_div(setup.disk_us_per_page, setup.owners),
            compute_us_per_page=setup.compute_us_per_page,
        )
        self._end_runs(now_us)
        self._take_arrivals(now_us)
        self._admit(now_us)
        core.end_tick()

    def _end_runs(self, now_us: int) -> None:
        still_loading = []
        for run, service_us in self._loading:
            if run.load_backs:
                still_loading.append((run, service_us))
            else:
                heappush(self._running, (now_us + service_us, run.seq_id, run))
        self._loading = still_loading
        while self._running and self._running[0][0] <= now_us:
            self.core.close(heappop(self._running)[2])
            self.num_done += 1

    def _take_arrivals(self, now_us: int) -> None:
        while self._num_arrived < len(self._arrivals) and self._arrivals[self._num_arrived] <= now_us:
            seq_id = self._num_arrived
            self._num_arrived += 1
            request = self._trace.requests[seq_id]
            if max(owner_counts(0, self._total_pages(request), self._setup.owners)) > self.core.config.l1_pages:
                self.num_refused += 1
                self.num_done += 1
                continue
            hold = self.core.hold(seq_id, request.hashes, len(request.hashes)) if self._setup.has_l3 else None
            self._waiting.append(_Waiting(seq_id, request, hold))

    def _admit(self, now_us: int) -> None:
        """First come, first served, but for those that wait for the disk."""
        left: list[_Waiting] = []
        for at, waiting in enumerate(self._waiting):
            if waiting.hold is not None and not waiting.hold.done:
                left.append(waiting)
            elif len(self._running) + len(self._loading) >= self._setup.max_running or not self._start(waiting, now_us):
                left += self._waiting[at:]
                break
        self._waiting = left

    def _start(self, waiting: _Waiting, now_us: int) -> bool:
        """Open the request, take its pages and give those of its prompt to the tree; False: no room yet."""
        core, request, setup = self.core, waiting.request, self._setup
        hashes = request.hashes
        found = core.probe(hashes, len(hashes))
        # A page that is found whole counts, as it does in the trace; but a token is always computed, so the last page
        # of a prompt that is found whole is made anew.
        limit = min(len(hashes), (request.input_tokens - 1) // setup.page_tokens)
        in_l1, total = min(found.in_l1, limit), self._total_pages(request)
        if not core.has_room_to_open(hashes, in_l1, total - in_l1, 0):
            return False
        run = core.open(waiting.seq_id, hashes, limit)
        if waiting.hold is not None:
            core.release(waiting.hold)
        computed = request.input_tokens - run.num_cached * setup.page_tokens
        if not core.allocate(run, total - len(run.pages)):
            raise AssertionError(f"request {waiting.seq_id}: no room for {total} pages where there was room")
        core.commit(run, hashes[run.num_cached :])
        self._count(found, waiting.hold, len(hashes), now_us)
        service_us = setup.service_us(computed, request.output_tokens)
        if run.load_backs:
            self._loading.append((run, service_us))
        else:
            heappush(self._running, (now_us + service_us, run.seq_id, run))
        return True

    def _count(self, found: Found, hold: Hold | None, num_pages: int, now_us: int) -> None:
        """Pages by the tier that had them when the request came: from disk what it was held for."""
        from_disk = 0
        if hold is not None:
            from_disk = max(0, min(found.end, hold.landed_end) - max(found.in_l1, hold.landed_first))
        by_tier = {"l1": found.in_l1, "l2": found.end - found.in_l1 - from_disk, "l3": from_disk}
        for tier, pages in by_tier.items():
            self.found[tier] += pages
        self._num_pages += num_pages
        self._series.admitted(now_us, num_pages, by_tier)

    # --- plain facts --------------------------------------------------------------------------------------------------

    def _next_us(self) -> int:
        """When something will be new."""
        times = []
        if self._num_arrived < len(self._arrivals):
            times.append(self._arrivals[self._num_arrived])
        if self._running:
            times.append(self._running[0][0])
        if (transfer_us := self.workers.next_us()) is not None:
            times.append(transfer_us)
        if self.workers.seen or self.core.busy:
            times.append(self._now_us + BUSY_TICK_US)
        if not times:
            raise AssertionError(f"the replay stands still in tick {self._tick}: {len(self._waiting)} requests wait")
        return min(times)

    def _total_pages(self, request: TraceRequest) -> int:
        return total_pages(request, self._setup.page_tokens)

    def _evicted(self) -> dict[str, int]:
        counters, floor = self.core.counters, self.workers.floor
        return {
            "l1": counters.evicted_l1,
            "l2": counters.evicted_l2,
            "l3": floor.num_collected if floor else 0,
        }


def total_pages(request: TraceRequest, page_tokens: int) -> int:
    """Pages of prompt and answer."""
    return max(len(request.hashes), ceil_div(request.input_tokens + request.output_tokens, page_tokens))


def core_config(trace: Trace, setup: Setup) -> CoreConfig:
    """The core for these sizes. A tier without a limit gets what the trace can need at most: a free list is a list."""
    owners = setup.owners
    cached = max(trace.unique_of_owner(owner, owners) for owner in range(owners))
    l1_pages, l2_pages = setup.l1_pages, setup.l2_pages
    if l1_pages is None:
        most = max(ceil_div(total_pages(request, setup.page_tokens), owners) for request in trace.requests)
        l1_pages = cached + most * min(setup.max_running, len(trace.requests))
    if l2_pages is None:
        l2_pages = 2 * cached + 1  # reloads may hold half of it
    return CoreConfig(
        num_owners=owners,
        l1_pages=max(1, l1_pages),
        l1_free_pages=setup.watermark,
        l2_frames=l2_pages,
        policy=setup.l2_policy,
        disk=setup.has_l3,
        staging_frames=STAGING_FRAMES if setup.has_l3 else 0,
    )


def _of_one_rank(values: Sequence[int]) -> Sequence[int]:
    """The agreement of all ranks: each reports the same."""
    return values
