"""Drives an EngineCore with a fake runner, as the engine process would, and gathers what clients would see.

With `l2_frames`, and with a shelf as its `disk`, it has fake tiers below L1; steps then run late.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benthic.engine.core import EngineCore
from benthic.engine.plan import SchedulerLimits
from benthic.engine.tier_workers import TierWorkers
from benthic.kvcache import CacheCore, CoreConfig, MinReduce, page_hashes, root_hash
from benthic.messages import Finished, Outputs, SamplingParams, Submit, ToEngine
from benthic.parallel.control import Alone
from tests.support.fake_runner import POISON, FakeDevice, FakeRunner, greedy
from tests.support.fake_tiers import FakeCopies, FakeDisk, Shelf, Truth, Weather, watch


@dataclass
class Seen:
    """What one request's client saw."""

    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    by_tier: tuple[int, int, int] = (0, 0, 0)
    prompt_len: int = 0
    choice: int = 0
    computed: int = 0  # tokens of its prompt chunks, as launched
    admissions: int = 0
    finished: Finished | None = None
    prompt_scores: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)  # the first value of each row


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a driver's engine stands among the ranks."""

    rank: int = 0
    num_ranks: int = 1
    device: FakeDevice | None = None
    min_reduce: MinReduce = list


class _Lockstep(Alone):
    """Every driver is given the same messages and clock, so that agreement is all that is exchanged."""

    def __init__(self, min_reduce: MinReduce) -> None:
        self.min_reduce = min_reduce  # type: ignore[assignment]  # in place of the method


class Driver:
    """An engine with `l1_pages` pages a lane, and its clients. `tiers` goes to the CoreConfig."""

    def __init__(
        self,
        *,
        l1_pages: int = 64,
        page_size: int = 4,
        max_running: int = 8,
        chunk_tokens: int = 16,
        max_request_tokens: int | None = None,
        l1_free_pages: int = 2,
        queue_timeout_us: int = 0,
        step_context_tokens: int = 0,
        seed: int = 0,
        disk: Shelf | None = None,
        weather: Weather | None = None,
        truth: Shelf | None = None,
        place: Place | None = None,
        **tiers: Any,
    ) -> None:
        self.page_size = page_size
        self.limits = SchedulerLimits(
            page_size=page_size,
            max_running=max_running,
            max_request_tokens=max_request_tokens or l1_pages * page_size,
            chunk_tokens=chunk_tokens,
            l1_free_pages=l1_free_pages,
            queue_timeout_us=queue_timeout_us,
            step_context_tokens=step_context_tokens,
        )
        place = place or Place()
        tiers = ({"staging_frames": 32, "reload_timeout_us": 200_000} | tiers) if disk is not None else tiers
        self.core = CacheCore(
            CoreConfig(
                num_owners=place.num_ranks,
                l1_pages=l1_pages,
                l1_free_pages=l1_free_pages,
                disk=disk is not None,
                **tiers,
            )
        )
        self.truth = Truth(pages={} if truth is None else truth)
        device = place.device or FakeDevice(l1_pages, page_size, max_running, deferred=self.core.config.l2_frames > 0)
        self.runner = FakeRunner(l1_pages, page_size, max_running, seed, device)
        self.copies: FakeCopies | None = None
        self.disk: FakeDisk | None = None
        if self.core.config.l2_frames:
            self._open_tiers(place, disk, weather or Weather(seed=seed))
        self.now = 0.0
        self.engine = EngineCore(
            self.limits,
            self.core,
            self.runner,
            clock=lambda: self.now,
            workers=TierWorkers(rank=place.rank, num_owners=place.num_ranks, copies=self.copies, disk=self.disk),
            control=_Lockstep(place.min_reduce),
        )
        self.seen: dict[int, Seen] = {}
        self.replies: list[object] = []
        self.leads = place.rank == 0  # lets the device's steps run
        self._pace = random.Random(f"device {seed}")

    def _open_tiers(self, place: Place, shelf: Shelf | None, weather: Weather) -> None:
        rank, device, config = place.rank, self.runner.device, self.core.config
        self.copies = FakeCopies(device, rank, config.l2_frames, weather, self.truth)
        watch(self.core.state.l1, rank, partial(self._freed_page, self.copies, rank))
        frame_freed: list[Callable[[int], None]] = [self.copies.freed_frame]
        if shelf is not None:
            self.disk = FakeDisk(
                shelf,
                self.copies,
                rank=rank,
                num_owners=place.num_ranks,
                staging=config.staging_frames,
                weather=weather,
                truth=self.truth,
            )
            frame_freed.append(self.disk.freed_frame)

        def freed_frame(frame: int) -> None:
            for told in frame_freed:
                told(frame)

        watch(self.core.state.l2, rank, freed_frame)

    def _freed_page(self, copies: FakeCopies, rank: int, page: int) -> None:
        """Steps launched before may still use the page; what comes after must not find anything in it."""
        copies.freed_page(page)
        device, p = self.runner.device, self.page_size

        def poison() -> None:
            device.kv[rank, page * p : (page + 1) * p] = POISON

        device.behind(self.runner.last_launch, poison)

    def submit(self, request_id: int, prompt: list[int], *, priority: int = 0, salt: str | None = None, choice: int = 0,
               **params: object) -> Submit:  # fmt: skip
        """The Submit of one request; send it with `tick`."""
        ids = np.array(prompt, np.int32).tobytes()
        root = root_hash(hashlib.sha256(b"namespace").digest(), salt)
        self.seen[request_id] = Seen(prompt_len=len(prompt), choice=choice)
        if self.copies is not None:
            self._learn(root, prompt + greedy(prompt, int(params.get("max_tokens", 4))))  # type: ignore[call-overload]
        return Submit(
            id=request_id,
            choice=choice,
            prompt=ids,
            root=root,
            hashes=b"".join(page_hashes(root, ids, self.page_size)),
            priority=priority,
            params=SamplingParams(**({"max_tokens": 4, "temperature": 0.0} | params)),  # type: ignore[arg-type]
        )

    def _learn(self, root: bytes, tokens: list[int]) -> None:
        hashes = page_hashes(root, np.array(tokens, np.int32).tobytes(), self.page_size)
        for i, page_hash in enumerate(hashes):
            self.truth.pages[page_hash] = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])

    def tick(self, *messages: ToEngine) -> None:
        """One tick; checks the core afterwards."""
        self.let_time_pass()
        self.turn(*messages)

    def turn(self, *messages: ToEngine) -> None:
        """The engine's tick, and checks."""
        replies = self.engine.tick(list(messages))
        self._note_plan()
        for reply in replies:
            self.replies.append(reply)
            if isinstance(reply, Outputs):
                self._take(reply)
        self.core.check()
        self._check_decodes()
        self._check_tiers()

    def let_time_pass(self) -> None:
        """What happens by itself between two ticks."""
        self.now += 0.01
        self.truth.tick += 1
        if self.leads and self.copies is not None:
            while self.runner.device.stream and self._pace.random() < 0.3:
                self.runner.device.run_next()
        if self.copies is not None:
            self.copies.advance()
        if self.disk is not None:
            self.disk.advance()

    def _check_tiers(self) -> None:
        """Nobody waits past its bound."""
        now_us = int(self.now * 1e6)
        for request in self.engine.scheduler.held:
            assert request.hold is not None
            assert now_us <= request.hold.bound_us, f"request {request.id} is held past its bound"

    def _note_plan(self) -> None:
        """How much is computed for whom; beside running decodes nobody computes on a load-back in flight."""
        if not (self.runner.steps and self.runner.steps[-1].tick == self.engine.tick_count):
            return
        plan = self.engine._outstanding[-1][0]
        for chunk in plan.chunks:
            seen = self.seen[chunk.request.id]
            seen.computed += chunk.count
            seen.admissions += chunk.first
        if len(plan.decode_slots):
            rows = self.engine.scheduler.rows
            requests = [rows.requests[slot] for slot in plan.decode_slots.tolist()]
            decoding = {op for r in requests if r is not None and r.run is not None for op in r.run.load_backs}
            assert decoding.issuperset(plan.load_backs), "a chunk beside decodes waits for a load-back"

    def _check_decodes(self) -> None:
        """What has just been launched decodes only for requests that have their pages."""
        if self.runner.steps and self.runner.steps[-1].tick == self.engine.tick_count:
            step, rows = self.runner.steps[-1], self.engine.scheduler.rows
            assert rows.decoding[step.state_slots[: step.num_decode]].all(), "a preempted request decodes"

    def _take(self, outputs: Outputs) -> None:
        for p in outputs.prefilled:
            seen = self.seen[p.id]
            assert seen.cached is None
            seen.by_tier = (p.cached_l1, p.cached_l2, p.cached_l3)
            assert min(seen.by_tier) >= 0
            seen.cached = sum(seen.by_tier)
            assert seen.cached < seen.prompt_len
            if seen.admissions == 1:
                assert seen.cached == seen.prompt_len - seen.computed, "what was not computed came from the cache"
        ids = np.frombuffer(outputs.ids, np.int64).tolist()
        for request_id, token in zip(ids, np.frombuffer(outputs.tokens, np.int32).tolist(), strict=True):
            assert self.seen[request_id].finished is None
            self.seen[request_id].tokens.append(token)
        for scored in outputs.logprobs:
            seen = self.seen[scored.id]
            assert seen.finished is None
            (seen.prompt_scores if scored.is_prompt else seen.scores).extend(p.logprob for p in scored.positions)
        for state in outputs.hidden:
            self.seen[state.id].hidden.extend(np.frombuffer(state.rows, np.float32)[::4].tolist())
        for f in outputs.finished:
            assert self.seen[f.id].finished is None
            self.seen[f.id].finished = f

    def run(self, *messages: ToEngine, max_ticks: int = 20_000) -> None:
        """Tick until nothing is left to do."""
        self.tick(*messages)
        for _ in range(max_ticks):
            if self.engine.idle:
                return
            self.tick()
        raise AssertionError(f"not idle after {max_ticks} ticks: {self.engine.state()}")

    def assert_no_leak(self) -> None:
        """With nothing running, every page and frame is free or cached, and a flush frees all."""
        lanes = [*self.core.lanes(), *self.core.l2_lanes()]
        assert all(lane.private == 0 and lane.locked == 0 for lane in lanes), lanes
        self.core.flush()
        self.core.check()
        assert all(lane.free == lane.total for lane in [*self.core.lanes(), *self.core.l2_lanes()])
        assert self.engine.scheduler.rows.num_used == 0
        assert not self.core.reloads.holds
        assert not self.engine.workers.seen


class Ranks:
    """Several ranks in lockstep: each an engine, a copy engine and a disk of its own, one device for all.

    `options` are a driver's; every rank's tiers have their own delays and failures.
    """

    def __init__(self, num_ranks: int, shelves: list[Shelf], truth: Shelf, **options: Any) -> None:
        shape = (options.get("l1_pages", 64), options.get("page_size", 4), options.get("max_running", 8))
        device = FakeDevice(*shape, num_ranks=num_ranks, deferred=True)
        self.drivers = [
            Driver(
                disk=shelves[rank],
                truth=truth,
                place=Place(rank=rank, num_ranks=num_ranks, device=device, min_reduce=partial(self._reduce, rank)),
                **options,
            )
            for rank in range(num_ranks)
        ]
        self.leader = self.drivers[0]
        self._reported: list[list[int]] = []  # by rank, in this tick

    def submit(self, request_id: int, prompt: list[int], **params: Any) -> Submit:
        """The Submit that every rank gets."""
        submits = [d.submit(request_id, prompt, **params) for d in self.drivers]
        return submits[0]

    def tick(self, *messages: ToEngine) -> None:
        """One tick of every rank; they must stay alike."""
        for d in self.drivers:
            d.let_time_pass()
        self._reported = []
        for d in self.drivers:
            d.turn(*messages)
        assert len({d.core.digest() for d in self.drivers}) == 1, "the ranks have parted"

    def run(self, *messages: ToEngine, max_ticks: int = 20_000) -> None:
        """Tick until nothing is left to do."""
        self.tick(*messages)
        for _ in range(max_ticks):
            if self.leader.engine.idle:
                assert all(d.engine.idle for d in self.drivers)
                return
            self.tick()
        raise AssertionError(f"not idle after {max_ticks} ticks: {self.leader.engine.state()}")

    def _reduce(self, rank: int, values: Sequence[int]) -> list[int]:
        """The least over the ranks. The first to come looks what the others are about to bring."""
        if not self._reported:
            self._reported = [self._values(d) for d in self.drivers]
        assert list(values) == self._reported[rank], "a rank brings another vector than the ranks' windows ask for"
        return [min(column) for column in zip(*self._reported, strict=True)]

    def _values(self, d: Driver) -> list[int]:
        workers, core = d.engine.workers, d.core
        workers.poll()
        workers.report_now(core.overdue(int(d.now * 1e6)))
        return [workers.seen.get(op, 0) for window in core.windows() for op in window]
