"""Random lives of an engine with tiers below L1: requests, aborts, flushes, a disk that hangs, stops and kills.

The same for a seed. Whatever happens, a client sees the tokens that its request alone would get.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benthic.messages import Abort, FlushCache, ToEngine
from tests.support.engine_driver import Driver, Ranks
from tests.support.fake_runner import greedy
from tests.support.fake_tiers import Shelf, Weather

FLUSHES = (("l1",), ("l2",), ("l1", "l2"), ("l3",), ("l1", "l2", "l3"))
IDLE_WITHIN = 3000  # ticks after the last arrival; 30 s of the driver's clock


def prompt_of(length: int, start: int = 1) -> list[int]:
    """Token ids; prompts with different starts share no page."""
    return [(start * 17 + i * 5) % 90 for i in range(length)]


@dataclass(frozen=True)
class Job:
    """What was asked, and so what the answer must be."""

    prompt: list[int]
    max_tokens: int
    scored: bool

    def check(self, d: Driver, request_id: int, *, ended: bool) -> None:
        """The client's answer is right as far as it goes; `ended`: it must be over."""
        seen, want = d.seen[request_id], greedy(self.prompt, self.max_tokens)
        reason = None if seen.finished is None else seen.finished.reason
        assert not ended or reason in ("length", "abort", "error")
        assert seen.tokens == (want if reason == "length" else want[: len(seen.tokens)])
        if self.scored:
            assert not seen.cached, "prompt log-probabilities need every row computed"
            assert reason != "length" or seen.prompt_scores == [-float(i) for i in range(1, len(self.prompt))]


@dataclass
class Workload:
    """One engine after another over the same shelves; `counts` says what has happened."""

    seed: int
    num_ranks: int = 1
    with_disk: bool = True
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.rough = self.rng.random() < 0.5
        self.heads = [prompt_of(self.rng.randint(0, 36), start) for start in range(3)]
        self.shelves: list[Shelf] = [{} for _ in range(self.num_ranks)]
        self.truth: Shelf = {}
        self.options = self._options()
        self.next_id = 0

    def live(self, num_ticks: int, *, kill: bool) -> None:
        """Open an engine, let things happen, and end it: with `kill` in the middle of them."""
        engine = self._open()
        drivers = [engine] if isinstance(engine, Driver) else engine.drivers
        jobs: dict[int, Job] = {}
        aborts: dict[int, int] = {}
        for tick in range(num_ticks):
            engine.tick(*self._messages(engine, drivers[0], tick, jobs, aborts))
            self._meddle(drivers)
        for d in drivers:
            if d.disk is not None:
                d.disk.stuck = False
        if kill:
            for request_id, job in jobs.items():
                job.check(drivers[0], request_id, ended=False)
            return
        engine.run(max_ticks=IDLE_WITHIN)
        for request_id, job in jobs.items():
            job.check(drivers[0], request_id, ended=True)
        for d in drivers:
            self._end(d, drivers[0])

    def _end(self, d: Driver, leader: Driver) -> None:
        """Nothing is left anywhere, and what is counted adds up."""
        assert [(s.tokens, s.by_tier) for s in d.seen.values()] == [(s.tokens, s.by_tier) for s in leader.seen.values()]
        totals, firsts = (
            d.engine.scheduler.totals,
            [s for s in d.seen.values() if s.choice == 0 and s.cached is not None],
        )
        by_tier = (totals.cached_tokens_l1, totals.cached_tokens_l2, totals.cached_tokens_l3)
        assert by_tier == tuple(sum(s.by_tier[i] for s in firsts) for i in range(3))
        assert totals.prompt_tokens == sum(s.prompt_len for s in firsts)
        c = d.core.counters
        self.counts += Counter(
            preemptions=totals.preemptions, l1=by_tier[0], l2=by_tier[1], l3=by_tier[2],
            load_backs=c.loaded_back, failed_backups=c.backup_failed, failed_spills=c.durable_failed_ops,
            timeouts=c.reload_timeouts, lost=c.spill_nodes_lost,
            errors=sum(s.finished is not None and s.finished.reason == "error" for s in d.seen.values()),
        )  # fmt: skip
        d.assert_no_leak()
        d.engine.close()

    def _open(self) -> Driver | Ranks:
        if self.num_ranks > 1:
            return Ranks(self.num_ranks, self.shelves, self.truth, **self.options)
        return Driver(disk=self.shelves[0] if self.with_disk else None, truth=self.truth, **self.options)

    def _messages(
        self, engine: Driver | Ranks, d: Driver, tick: int, jobs: dict[int, Job], aborts: dict[int, int]
    ) -> list[ToEngine]:
        rng = self.rng
        messages: list[ToEngine] = []
        if rng.random() < 0.3:
            head = self.heads[rng.randrange(3)]
            head = head[: rng.choice([len(head), len(head), rng.randint(0, len(head))])]
            prompt = (head + prompt_of(rng.randint(1, 12), 20 + rng.choice([0, 1, self.next_id])))[:36]
            job = Job(prompt, rng.randint(1, 12), scored=rng.random() < 0.1)
            asked: dict[str, Any] = {"priority": rng.randint(-1, 1), "salt": rng.choice([None, None, None, "tenant"])}
            if job.scored:
                asked["prompt_logprobs"] = 1
            for choice in range(rng.choice([1, 1, 1, 3])):
                jobs[self.next_id] = job
                messages.append(engine.submit(self.next_id, prompt, max_tokens=job.max_tokens, choice=choice, **asked))
                if rng.random() < 0.1:
                    aborts[self.next_id] = tick + rng.randint(0, 20)
                self.next_id += 1
        gone = tuple(i for i, at in aborts.items() if at == tick and d.seen[i].finished is None)
        if gone:
            messages.append(Abort(gone))
        if rng.random() < 0.03:
            messages.append(FlushCache(tick, rng.choice(FLUSHES)))
        return messages

    def _meddle(self, drivers: Sequence[Driver]) -> None:
        """Sometimes a disk hangs, or goes on; or forgets a page."""
        disk = self.rng.choice(drivers).disk
        if disk is None:
            return
        if self.rough and self.rng.random() < 0.02:
            disk.stuck = not disk.stuck
        if disk.shelf and self.rng.random() < 0.05:
            del disk.shelf[self.rng.choice(list(disk.shelf))]

    def _options(self) -> dict[str, Any]:
        rng, often = self.rng, int(self.rough)
        options: dict[str, Any] = {
            "l1_pages": rng.randint(12, 40) // self.num_ranks + self.num_ranks,
            "l2_frames": rng.randint(8, 80) // self.num_ranks,
            "max_running": rng.randint(1, 6),
            "chunk_tokens": 4 * rng.randint(1, 5),
            "l1_free_pages": rng.randint(0, 3),
            "max_request_tokens": 48,
            "queue_timeout_us": rng.choice([0, 0, 500_000]),
            "policy": rng.choice(["write_through", "write_through_selective", "write_back"]),
            "seed": self.seed,
            "weather": Weather(
                seed=self.seed,
                copy_ticks=(0, rng.choice([0, 1, 3, 8])),
                disk_ticks=(rng.choice([0, 1]), rng.choice([1, 4, 10])),
                backup_fails=rng.choice([0, 0.1, 0.4]) * often,
                gather_fails=rng.choice([0, 0.1]) * often,
                durable_fails=rng.choice([0, 0.1, 0.6]) * often,
                lookup_short=rng.choice([0, 0.2]) * often,
                read_fails=rng.choice([0, 0.1]) * often,
                read_hangs=rng.choice([0, 0.05, 0.2]) * often,
            ),
        }
        if self.with_disk:
            options |= {
                "staging_frames": rng.choice([32, 33, 64]),
                "spill_max_inflight": rng.choice([1, 4, 64]),
                "spill_min_hits": rng.choice([0, 0, 1]),
                "reload_max_inflight": rng.randint(1, 4),
                "reload_min_pages": rng.choice([1, 1, 3]),
            }
        return options
