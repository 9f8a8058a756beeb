"""Drives an EngineCore with a fake runner, as the engine process would, and gathers what clients would see."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from benthic.engine.core import EngineCore, build_core
from benthic.engine.plan import SchedulerLimits
from benthic.kvcache import page_hashes, root_hash
from benthic.messages import Finished, Outputs, SamplingParams, Submit, ToEngine
from tests.support.fake_runner import FakeRunner


@dataclass
class Seen:
    """What one request's client saw."""

    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    finished: Finished | None = None
    prompt_scores: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)  # the first value of each row


class Driver:
    """An engine with `l1_pages` pages, and its clients."""

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
        seed: int = 0,
    ) -> None:
        self.page_size = page_size
        self.limits = SchedulerLimits(
            page_size=page_size,
            max_running=max_running,
            max_request_tokens=max_request_tokens or l1_pages * page_size,
            chunk_tokens=chunk_tokens,
            l1_free_pages=l1_free_pages,
            queue_timeout_us=queue_timeout_us,
        )
        self.core = build_core(self.limits, l1_pages)
        self.runner = FakeRunner(l1_pages, page_size, max_running, seed)
        self.now = 0.0
        self.engine = EngineCore(self.limits, self.core, self.runner, clock=lambda: self.now)
        self.seen: dict[int, Seen] = {}
        self.replies: list[object] = []

    def submit(self, request_id: int, prompt: list[int], *, priority: int = 0, salt: str | None = None, choice: int = 0,
               **params: object) -> Submit:  # fmt: skip
        """The Submit of one request; send it with `tick`."""
        ids = np.array(prompt, np.int32).tobytes()
        root = root_hash(hashlib.sha256(b"namespace").digest(), salt)
        self.seen[request_id] = Seen()
        return Submit(
            id=request_id,
            choice=choice,
            prompt=ids,
            root=root,
            hashes=b"".join(page_hashes(root, ids, self.page_size)),
            priority=priority,
            params=SamplingParams(**({"max_tokens": 4, "temperature": 0.0} | params)),  # type: ignore[arg-type]
        )

    def tick(self, *messages: ToEngine) -> None:
        """One tick; checks the core afterwards."""
        self.now += 0.01
        for reply in self.engine.tick(list(messages)):
            self.replies.append(reply)
            if isinstance(reply, Outputs):
                self._take(reply)
        self.core.check()
        self._check_decodes()

    def _check_decodes(self) -> None:
        """What has just been launched decodes only for requests that have their pages."""
        if self.runner.steps and self.runner.steps[-1].tick == self.engine.tick_count:
            step, rows = self.runner.steps[-1], self.engine.scheduler.rows
            assert rows.decoding[step.state_slots[: step.num_decode]].all(), "a preempted request decodes"

    def _take(self, outputs: Outputs) -> None:
        for p in outputs.prefilled:
            assert self.seen[p.id].cached is None
            self.seen[p.id].cached = p.cached_l1
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
        """With nothing running, every page is free or cached, and a flush frees all."""
        assert all(lane.private == 0 and lane.locked == 0 for lane in self.core.lanes())
        self.core.flush()
        assert all(lane.free == lane.total for lane in self.core.lanes())
        assert self.engine.scheduler.rows.num_used == 0
