"""The engine without its process.

One call of `tick` takes messages in, keeps the runner one step ahead, and gives messages out. At most two steps are
outstanding: one that the device runs and one queued behind it, whose decode rows take their input ids from the
device's own buffer. So the host prepares step N+1 while step N runs, and learns N's tokens one tick later.
"""

import time
from collections import deque
from collections.abc import Callable

from benthic.engine.batching import build_step
from benthic.engine.events import Events
from benthic.engine.plan import SchedulerLimits, StepPlan, StepResult, TickInput
from benthic.engine.scheduler import Scheduler
from benthic.kvcache import CacheCore, CoreConfig
from benthic.messages import (
    Abort,
    CacheState,
    FlushCache,
    FromEngine,
    LaneState,
    QueryState,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
)
from benthic.runner.interface import PendingStep, Runner

MAX_OUTSTANDING = 2
SLOW_TICK_S = 0.1
MAX_STILL_TICKS = 1000


class EngineCore:
    """Scheduler + runner. Single-threaded: call it from one thread only."""

    def __init__(
        self, limits: SchedulerLimits, core: CacheCore, runner: Runner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = Scheduler(limits, core)
        self.runner = runner
        self.tick_count = 0
        self.host_s = self.busy_s = 0.0
        self.launched_ticks = self.slow_ticks = 0
        self.last_host_s = 0.0
        self.shutting_down = False
        self._clock = clock
        self._outstanding: deque[tuple[StepPlan, PendingStep]] = deque()
        self._busy_since = 0.0
        self._still_ticks = 0
        self._blocked = False  # the last tick could launch nothing although steps are outstanding

    @property
    def idle(self) -> bool:
        """Nothing to do until a message comes."""
        return self.scheduler.idle and not self._outstanding

    def tick(self, messages: list[ToEngine]) -> list[FromEngine]:
        """One turn: take in `messages` and finished steps, launch the next step. Raises what a forward raised."""
        results = self._collect()
        started = self._clock()
        self.tick_count += 1
        arrivals, aborts, flushes, control = _sort_messages(messages)
        inputs = TickInput(
            tick=self.tick_count,
            now_us=int(started * 1e6),
            arrivals=arrivals,
            aborts=aborts,
            flushes=flushes,
            results=results,
        )
        plan, events = self.scheduler.tick(inputs)
        if plan is not None:
            self._launch(plan, events)
        self._blocked = plan is None and bool(self._outstanding)
        self._check_progress(plan is not None or bool(self._outstanding) or bool(results))
        replies: list[FromEngine] = []
        if (outputs := events.message()) is not None:
            replies.append(outputs)
        replies.extend(events.flushed)
        replies.extend(reply for m in control if (reply := self._control(m)) is not None)
        self.last_host_s = self._clock() - started
        if plan is not None:
            self.host_s += self.last_host_s
            self.launched_ticks += 1
            self.slow_ticks += self.last_host_s > SLOW_TICK_S
        return replies

    def _collect(self) -> tuple[StepResult, ...]:
        """Finished steps, oldest first; waits for the oldest when the pipeline is full or nothing else can be done."""
        results = []
        must_wait = len(self._outstanding) >= MAX_OUTSTANDING or self._blocked
        while self._outstanding and (must_wait or self._outstanding[0][1].done()):
            plan, pending = self._outstanding.popleft()
            results.append(StepResult(plan=plan, output=pending.result()))
            must_wait = False
        if results and not self._outstanding:
            self.busy_s += self._clock() - self._busy_since
        return tuple(results)

    def _launch(self, plan: StepPlan, events: Events) -> None:
        step = build_step(plan, self.scheduler.rows)
        if not self._outstanding:
            self._busy_since = self._clock()
        self._outstanding.append((plan, self.runner.submit(step)))
        self.scheduler.launched(plan, events)

    def _check_progress(self, moved: bool) -> None:
        """A scheduler that has work and nothing under way must find something to launch.

        A bug here must not spin for ever.
        """
        self._still_ticks = 0 if moved or self.scheduler.idle else self._still_ticks + 1
        if self._still_ticks > MAX_STILL_TICKS:
            s = self.scheduler
            raise RuntimeError(
                f"the scheduler stands still in tick {self.tick_count}: {len(s.waiting)} waiting, "
                f"{s.num_running} running, lanes {lane_states(s.core)}"
            )

    def _control(self, message: QueryState | Shutdown) -> FromEngine | None:
        match message:
            case QueryState():
                return self.state(message.token)
            case Shutdown():
                self.shutting_down = True
                return None

    def state(self, token: int = 0) -> CacheState:
        """The tiers and the queue as they are now."""
        s = self.scheduler
        return CacheState(
            token=token,
            tick=self.tick_count,
            page_size=s.limits.page_size,
            nodes=s.core.num_nodes,
            lanes=lane_states(s.core),
            running=s.num_running,
            waiting=len(s.waiting) + len(s.draining),
            hits_tokens_l1=s.totals.cached_tokens_l1,
            query_tokens=s.totals.prompt_tokens,
            evicted_pages=s.core.evicted_pages,
            preemptions=s.totals.preemptions,
            digest=s.core.digest().hex(),
        )

    def stats(self) -> Stats:
        """Counters and gauges for the metrics."""
        s = self.scheduler
        running = self._clock() - self._busy_since if self._outstanding else 0.0
        return Stats(
            tick=self.tick_count,
            running=s.num_running,
            waiting=len(s.waiting) + len(s.draining),
            prompt_tokens=s.totals.prompt_tokens,
            cached_tokens_l1=s.totals.cached_tokens_l1,
            generated_tokens=s.totals.generated_tokens,
            preemptions=s.totals.preemptions,
            evicted_pages=s.core.evicted_pages,
            lanes=lane_states(s.core),
            busy_s=self.busy_s + running,
            host_s=self.host_s,
            ticks=self.launched_ticks,
            slow_ticks=self.slow_ticks,
        )

    def close(self) -> None:
        """Wait for what the device still runs and let the runner go."""
        while self._outstanding:
            self._outstanding.popleft()[1].result()
        self.runner.close()


def build_core(limits: SchedulerLimits, l1_pages: int, num_owners: int = 1) -> CacheCore:
    """The cache core for `l1_pages` pages in each of `num_owners` lanes."""
    return CacheCore(CoreConfig(num_owners=num_owners, l1_pages=l1_pages, l1_free_pages=limits.l1_free_pages))


def lane_states(core: CacheCore) -> tuple[LaneState, ...]:
    """Each lane's pages by what they hold."""
    return tuple(
        LaneState(lane=i, total=c.total, free=c.free, cached=c.cached, private=c.private, locked=c.locked)
        for i, c in enumerate(core.lanes())
    )


def _sort_messages(
    messages: list[ToEngine],
) -> tuple[tuple[Submit, ...], tuple[int, ...], tuple[int, ...], list[QueryState | Shutdown]]:
    """Arrivals, aborts, flushes, and what changes nothing replicated."""
    arrivals: list[Submit] = []
    aborts: list[int] = []
    flushes: list[int] = []
    control: list[QueryState | Shutdown] = []
    for m in messages:
        match m:
            case Submit():
                arrivals.append(m)
            case Abort():
                aborts.extend(m.ids)
            case FlushCache():
                flushes.append(m.token)
            case QueryState() | Shutdown():
                control.append(m)
    return tuple(arrivals), tuple(aborts), tuple(flushes), control
