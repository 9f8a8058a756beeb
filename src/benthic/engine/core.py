"""The engine without its process.

One call of `tick` takes messages in, keeps the runner one step ahead, and gives messages out. At most two steps are
outstanding: one that the device runs and one queued behind it, whose decode rows take their input ids from the
device's own buffer. So the host prepares step N+1 while step N runs, and learns N's tokens one tick later.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from benthic.engine.batching import build_step
from benthic.engine.events import Events
from benthic.engine.frames import TickFrame, tell
from benthic.engine.plan import SchedulerLimits, StepPlan, StepResult, TickInput
from benthic.engine.rates import PrefillRate
from benthic.engine.report import l2_lane_states, lane_states, pages_pending, tier_counters, waiting
from benthic.engine.scheduler import Scheduler
from benthic.engine.tier_workers import TierWorkers
from benthic.forward import Int32
from benthic.kvcache import Agreed, CacheCore, CoreConfig, OpId, agree, assert_same_state
from benthic.messages import (
    Abort,
    CacheState,
    FlushCache,
    FlushDone,
    FromEngine,
    QueryState,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
)
from benthic.parallel.control import Alone, Control, gather_ints
from benthic.runner.interface import PendingStep, Runner

MAX_OUTSTANDING = 2
SLOW_TICK_S = 0.1
MAX_STILL_TICKS = 1000
NOT_EMPTIED = "the index can't be written; its pages are not found any more, their slots are freed when it can"
EAGER_S, PATIENT_S = 0.001, 0.005  # between ticks with nothing to compute: copies, or only slow disk operations


class EngineCore:
    """Scheduler + runner. Single-threaded: call it from one thread only."""

    def __init__(
        self,
        limits: SchedulerLimits,
        core: CacheCore,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        workers: TierWorkers | None = None,
        control: Control | None = None,
        placement_assert: bool = False,
    ) -> None:
        """`control` joins the schedulers of all ranks; None: there is one. Owns the workers (None: L1 alone).

        On rank 0 `tick` is called, and tells the others what it was; they call `follow`.
        """
        self.scheduler = Scheduler(limits, core)
        self.runner = runner
        self.workers = workers or TierWorkers()
        self.tick_count = 0
        self.host_s = self.busy_s = self.tiers_s = 0.0
        self.finish_by = 0.0  # on the clock, once shutting down
        self.launched_ticks = self.slow_ticks = 0
        self.last_host_s = 0.0
        self.shutting_down = False
        self._clock = clock
        self._control_group = control or Alone()
        self._placement_assert = placement_assert
        self._rate = PrefillRate()
        self._on_disk: dict[int, int] = {}  # slots in use when a flush of L3 was asked for, by token
        self._outstanding: deque[tuple[StepPlan, PendingStep]] = deque()
        self._busy_since = self._step_since = 0.0
        self._launched = False
        self._still_ticks = 0
        self._blocked = False  # the last tick could launch nothing although steps are outstanding

    @property
    def idle(self) -> bool:
        """Nothing to do until a message comes."""
        return self.scheduler.idle and not self._outstanding and not self.scheduler.core.busy

    @property
    def computing(self) -> bool:
        """Whether a request is not over, or a step outstanding; copies and spills may go on without."""
        return not self.scheduler.idle or bool(self._outstanding)

    @property
    def unfinished(self) -> bool:
        """Whether a stop has something to wait for: answers, or pages on their way down; not reads."""
        return self.computing or self.scheduler.core.writing_down

    @property
    def pause_s(self) -> float:
        """How long to wait for messages before the next tick: nothing can be computed until an operation is over."""
        if self._outstanding or self._launched:
            return 0.0
        return PATIENT_S if self.scheduler.core.patient else EAGER_S

    def tick(self, messages: Sequence[ToEngine]) -> list[FromEngine]:
        """One turn: take in `messages` and finished steps, launch the next step. Raises what a forward raised."""
        results = self._collect()
        started = self._clock()
        self._poll()  # before the rate is read: a reload that is over has its reads in the rate of the same tick
        frame = TickFrame(
            now_us=int(started * 1e6),
            messages=tuple(messages),
            taken=tuple(result.output.tokens for result in results),
            read_us_per_page=self.workers.read_us_per_page,
            compute_us_per_page=self._rate.us_per_page(self.scheduler.limits.page_size),
        )
        tell(self._control_group, frame)
        return self._turn(frame, results, started)

    def follow(self, frame: TickFrame) -> None:
        """The turn that rank 0 has told of. Raises what a forward raised, and PeerLost."""
        results = tuple(self._take(tokens) for tokens in frame.taken)
        started = self._clock()
        self._poll()
        self._turn(frame, results, started)

    def _turn(self, frame: TickFrame, results: tuple[StepResult, ...], started: float) -> list[FromEngine]:
        self.tick_count += 1
        arrivals, aborts, flushes, control = _sort_messages(frame.messages)
        inputs = TickInput(
            tick=self.tick_count,
            now_us=frame.now_us,
            arrivals=arrivals,
            aborts=aborts,
            flushes=flushes,
            results=results,
            agreed=self._agree(frame.now_us),
            read_us_per_page=frame.read_us_per_page,
            compute_us_per_page=frame.compute_us_per_page,
        )
        self.scheduler.begin(inputs)
        self.tiers_s += self._clock() - started
        self._note_flushes(flushes)
        plan, events = self.scheduler.tick(inputs)
        # before the launch: a load-back must not wait for the forward that stands on it
        self._hand_on_commands(() if plan is None else plan.load_backs)
        if plan is not None:
            self._launch(plan, events)
        self.scheduler.core.end_tick()
        self._hand_on_commands()
        self._launched = plan is not None
        self._blocked = plan is None and bool(self._outstanding)
        self._check_progress(self._launched or bool(self._outstanding) or bool(results))
        if self._placement_assert:
            assert_same_state(self.tick_count, self.scheduler.core.digest(), self._control_group.min_reduce)
        replies: list[FromEngine] = []
        if (outputs := events.message()) is not None:
            replies.append(outputs)
        replies.extend(self._with_disk(done) for done in events.flushed)
        replies.extend(reply for m in control if (reply := self._control(m)) is not None)
        self._account(plan is not None, started)
        return replies

    def _account(self, launched: bool, started: float) -> None:
        self.last_host_s = self._clock() - started
        if launched:
            self.host_s += self.last_host_s
            self.launched_ticks += 1
            self.slow_ticks += self.last_host_s > SLOW_TICK_S

    # --- the tiers below ----------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        if self.scheduler.core.in_flight:
            self.workers.poll()

    def _agree(self, now_us: int) -> tuple[Agreed, ...]:
        """What is over on every rank; the only collective of a tick, and none with nothing in flight."""
        core, workers = self.scheduler.core, self.workers
        if not core.in_flight:  # replicated: every rank skips it together
            return ()
        workers.report_now(core.overdue(now_us))
        agreed = agree(core.windows(), workers.seen, self._control_group.min_reduce)
        workers.forget([a.op for a in agreed])
        return agreed

    def _hand_on_commands(self, waited: Sequence[OpId] = ()) -> None:
        if commands := self.scheduler.core.take_commands():
            started = self._clock()
            self.workers.submit(commands, waited)
            self.tiers_s += self._clock() - started

    def _note_flushes(self, flushes: tuple[FlushCache, ...]) -> None:
        for flush in flushes:
            if "l3" in flush.tiers:
                self._on_disk[flush.token] = self._pages_on_disk(self._slots_by_rank())

    def _with_disk(self, done: FlushDone) -> FlushDone:
        """Add what L3 held before and holds now, which only the ranks' workers know."""
        before = self._on_disk.pop(done.token, None)
        if before is None:
            return done
        used = self._slots_by_rank()
        kept = self._pages_on_disk(used)
        holding = [str(rank) for rank, slots in enumerate(used) if slots]
        names = f"rank{'s' if len(holding) > 1 else ''} {', '.join(holding)}: " if holding else ""
        return FlushDone(
            done.token,
            done.dropped | {"l3": max(0, before - kept)},
            done.kept | {"l3": kept},
            f"{names}{done.message or NOT_EMPTIED}" if done.message or kept else "",
        )

    def _slots_by_rank(self) -> tuple[int, ...]:
        """In use on each rank's disk: one exchange, in a tick in which every rank makes it."""
        return gather_ints(self._control_group, sum(d.slots_used for d in self.workers.disk_stats()))

    def _pages_on_disk(self, slots: Sequence[int]) -> int:
        """In so many slots of each rank: with one lane, every rank has its heads of the same pages."""
        return sum(slots) if self.scheduler.core.config.num_owners > 1 else max(slots)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _collect(self) -> tuple[StepResult, ...]:
        """Finished steps, oldest first; waits for the oldest when the pipeline is full or nothing else can be done."""
        results = []
        must_wait = len(self._outstanding) >= MAX_OUTSTANDING or self._blocked
        while self._outstanding and (must_wait or self._outstanding[0][1].done()):
            results.append(self._take())
            must_wait = False
        if results and not self._outstanding:
            self.busy_s += self._clock() - self._busy_since
        return tuple(results)

    def _take(self, tokens: Int32 | None = None) -> StepResult:
        """The oldest outstanding step's result, once it is there; `tokens`: what rank 0 sampled in it."""
        plan, pending = self._outstanding.popleft()
        output = pending.result()
        self._measure(plan)
        return StepResult(plan=plan, output=output if tokens is None else replace(output, tokens=tokens))

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A prefill has taken so long: known from the start, as a prefix on disk may come with the first request."""
        self._rate.measured(num_tokens, seconds)

    def _measure(self, plan: StepPlan) -> None:
        """The step has ended: how fast did it compute its prompts?"""
        now = self._clock()
        if not len(plan.decode_slots) and not plan.load_backs:
            self._rate.measured(sum(c.count for c in plan.chunks), now - self._step_since)
        self._step_since = now

    def _launch(self, plan: StepPlan, events: Events) -> None:
        step = build_step(plan, self.scheduler.rows)
        if not self._outstanding:
            self._busy_since = self._step_since = self._clock()
        hooks = self.workers.step_hooks(plan.load_backs)
        self._outstanding.append((plan, self.runner.submit(step, hooks)))
        self.scheduler.launched(plan, events)

    def _check_progress(self, moved: bool) -> None:
        """A scheduler that has work and nothing under way must find something to launch.

        A bug here must not spin for ever.
        """
        core = self.scheduler.core
        moved = moved or bool(core.in_flight) or bool(self.scheduler.held)
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
                return self.state(message.token) if self._control_group.rank == 0 else None
            case Shutdown():
                self.shutting_down = True
                self.finish_by = self._clock() + message.finish_by_s
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
            waiting=waiting(s),
            held=len(s.held),
            hits_tokens_l1=s.totals.cached_tokens_l1,
            hits_tokens_l2=s.totals.cached_tokens_l2,
            hits_tokens_l3=s.totals.cached_tokens_l3,
            query_tokens=s.totals.prompt_tokens,
            evicted_pages=s.core.counters.evicted_l1,
            preemptions=s.totals.preemptions,
            digest=s.core.digest().hex(),
            l2_lanes=l2_lane_states(s.core),
            policy=s.core.config.policy if s.core.config.l2_frames else "",
            tiers=tier_counters(s.core),
            disks=self.workers.disk_stats(),
            tick_tiers_s=self.tiers_s,
        )

    def stats(self) -> Stats:
        """Counters and gauges for the metrics."""
        s = self.scheduler
        running = self._clock() - self._busy_since if self._outstanding else 0.0
        return Stats(
            tick=self.tick_count,
            running=s.num_running,
            waiting=waiting(s),
            held=len(s.held),
            prompt_tokens=s.totals.prompt_tokens,
            cached_tokens_l1=s.totals.cached_tokens_l1,
            cached_tokens_l2=s.totals.cached_tokens_l2,
            cached_tokens_l3=s.totals.cached_tokens_l3,
            generated_tokens=s.totals.generated_tokens,
            preemptions=s.totals.preemptions,
            evicted_pages=s.core.counters.evicted_l1,
            lanes=lane_states(s.core),
            l2_lanes=l2_lane_states(s.core),
            tiers=tier_counters(s.core),
            disks=self.workers.disk_stats(),
            busy_s=self.busy_s + running,
            host_s=self.host_s,
            ticks=self.launched_ticks,
            slow_ticks=self.slow_ticks,
            tick_tiers_s=self.tiers_s,
        )

    @property
    def pages_pending(self) -> int:
        """Pages that are on their way to disk: what a stop would still wait for."""
        return pages_pending(self.scheduler.core)

    def cut_off(self) -> None:
        """End every request, for a stop: what they computed stays cached and goes on its way to disk."""
        if self.scheduler.requests:
            self.tick([Abort(tuple(self.scheduler.requests))])

    def end(self) -> None:
        """Tell the other ranks that no tick comes any more."""
        tell(self._control_group, TickFrame(now_us=0, ends=True))

    def close(self, finish_by_s: float = 0.0) -> bool:
        """Wait for what the device still runs and let everything go; the disk may take so many seconds.

        False: a disk hangs, and threads that may still write to it are left behind.
        """
        while self._outstanding:
            self._outstanding.popleft()[1].result()
        self.runner.close()
        return self.workers.close(finish_by_s)


def build_core(limits: SchedulerLimits, l1_pages: int, num_owners: int = 1) -> CacheCore:
    """A cache core of L1 alone, for `l1_pages` pages in each of `num_owners` lanes."""
    return CacheCore(CoreConfig(num_owners=num_owners, l1_pages=l1_pages, l1_free_pages=limits.l1_free_pages))


def _sort_messages(
    messages: Sequence[ToEngine],
) -> tuple[tuple[Submit, ...], tuple[int, ...], tuple[FlushCache, ...], list[QueryState | Shutdown]]:
    """Arrivals, aborts, flushes, and what changes nothing replicated."""
    arrivals: list[Submit] = []
    aborts: list[int] = []
    flushes: list[FlushCache] = []
    control: list[QueryState | Shutdown] = []
    for m in messages:
        match m:
            case Submit():
                arrivals.append(m)
            case Abort():
                aborts.extend(m.ids)
            case FlushCache():
                flushes.append(m)
            case QueryState() | Shutdown():
                control.append(m)
    return tuple(arrivals), tuple(aborts), tuple(flushes), control
