"""One rank of a cache: its core, its simulated workers, and the requests that all ranks see alike.

`rank` is a generator, so that ranks run side by side in one process or each in its own: it yields the rank's vector
for the agreement and is sent the minimum over all ranks; the last element of each vector is the digest of its core.

`python -m tests.support.cache_ranks RANK OWNERS SEED TICKS POLICY` runs one over lines of JSON on stdin and stdout;
`RankProcess` is the other end of that.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from benthic.kvcache import Agreed, CacheCore, CoreConfig, Hold, OpId, PageRun, Stream, agree
from tests.support.naive_cache import hashes_of
from tests.support.tier_sim import POISON, Worker

Summary = dict[str, int]  # what has happened, for a test that asks whether everything has
Answer = tuple[list[int], str]  # the rank's vector, the digest of its core
Turns = Generator[Answer, list[int], Summary]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What all ranks must agree on beforehand."""

    owners: int
    seed: int
    ticks: int = 300
    policy: str = "write_through"
    disk: bool = True
    check_every: int = 10
    whole: int = 0  # above 0: so many ranks that each keep a part of every page (tensor parallelism); `owners` is 1

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lane of each rank."""
        return (0,) * self.whole or tuple(range(self.owners))


def core_config(scenario: Scenario) -> CoreConfig:
    """A cache that is much too small for the requests."""
    n = scenario.owners
    return CoreConfig(
        num_owners=n,
        l1_pages=96 // n + 4,
        l1_free_pages=8 // n,
        l2_frames=160 // n + 8,
        policy=scenario.policy,
        disk=scenario.disk,
        staging_frames=48 // n + 1 if scenario.disk else 0,
        spill_max_inflight=6,
        reload_max_inflight=3,
        reload_timeout_us=(8_000, 3_000, 20_000)[scenario.seed % 3],
        reload_marks=scenario.seed % 2 == 0,
        reload_sample_pages=max(1, 4 // n),
    )


@cache
def prompt_hashes(head: int, length: int, tail: int) -> list[bytes]:
    """A prompt that shares its first pages with others of the same head."""
    return hashes_of((*[head] * length, *[10 + tail] * (tail % 7)))


def reports(windows: Sequence[Sequence[int]], seen: dict[int, int]) -> list[int]:
    """The rank's vector, as `agree` lays it out."""
    return [seen.get(op, 0) for window in windows for op in window]


@dataclass(slots=True, eq=False)
class Request:
    """As a scheduler would know it."""

    seq_id: int
    hashes: list[bytes]
    hold: Hold | None = None
    run: PageRun | None = None


class Rank:
    """Requests come and go by `shared`, equal on all ranks; how the workers get on is this rank's own."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        self.scenario = scenario
        self.core = CacheCore(core_config(scenario))
        self.worker = Worker(self.core, scenario.lanes[rank])
        self.shared = random.Random(scenario.seed)
        self.own = random.Random(f"{scenario.seed} {rank}")
        self.reported: dict[OpId, int] = {}  # what has come here of what the worker has seen
        self.speed, self.mail = 0.5, 1.0
        self.requests: list[Request] = []
        self.now_us = 0
        self.tick = 0
        self.next_id = 0
        self.seen: Summary = {"ticks": 0, "suspended": 0, "drains": 0, "disk_flushes": 0, "landed": 0}
        self.seen |= {"samples": 0, "second_parts": 0}

    def turns(self) -> Turns:
        """All ticks, then what is left until nothing is in flight."""
        failing = self.shared.choice([0.0, 0.05])
        for _ in range(self.scenario.ticks):
            if self.shared.random() < 0.03:
                failing = self.shared.choice([0.0, 0.0, 0.0, 0.05, 0.3])
            if self.shared.random() < 0.02:
                self.now_us += self.shared.choice([30_000, 100_000_000])  # deadlines pass, pauses end
            yield from self._begin()
            self._serve()
            self._end(failing)
            self._change_pace()
        self.speed, self.mail = 0.5, 1.0
        for request in self.requests:
            self._drop(request)
        self.requests = []
        left = 0
        while self.core.busy:
            left += 1
            assert left < 500, f"still busy: {self.core.windows()}, {self.core.spills.listed}"
            yield from self._begin()
            self._end(0.0)
        return self._settled()

    def _begin(self) -> Generator[Answer, list[int], None]:
        self.tick += 1
        self.now_us += self.shared.randint(1, 1500)
        core = self.core
        self._take_reports(core.overdue(self.now_us))
        windows = core.windows()
        least = yield reports(windows, self.reported), core.digest().hex()
        agreed = self.agreed(windows, least)
        for end in agreed:
            del self.worker.seen[end.op], self.reported[end.op]
        rates = [(0, 0), (100, 300), (0, 300), (300, 100), (0, 300)][self.tick // 40 % 5]
        if rates == (0, 300) and self.tick % 8 < 4:  # now and then the disk's rate is known: good, or bad
            rates = ((100, 500)[self.tick % 8 == 3], 300)
        core.begin_tick(self.tick, self.now_us, agreed, read_us_per_page=rates[0], compute_us_per_page=rates[1])
        self._note()

    def agreed(self, windows: Sequence[Sequence[OpId]], least: list[int]) -> tuple[Agreed, ...]:
        """What this rank takes for over."""
        return agree(windows, self.reported, lambda mine: [least[i] for i in range(len(mine))])

    def _take_reports(self, overdue: Sequence[OpId]) -> None:
        """Some of what the worker has seen; reports overtake one another. What is overdue comes at once."""
        self.worker.report_now(overdue)
        new = [op for op in self.worker.seen if op not in self.reported]
        for op in new:
            if op in overdue or self.own.random() < self.mail:
                self.reported[op] = self.worker.seen[op]

    def _change_pace(self) -> None:
        """Now and then this rank becomes quick, or all but stands still, or its reports do."""
        if self.own.random() < 0.1:
            self.speed = self.own.choice([0.1, 0.5, 0.5, 1.0, 1.0, 1.0])
            self.mail = self.own.choice([0.3, 1.0, 1.0, 1.0, 1.0, 1.0])

    def _note(self) -> None:
        core, seen = self.core, self.seen
        seen["ticks"] += 1
        seen["suspended"] += core.spills.suspended
        seen["drains"] += len(core.state.ops.of(Stream.DRAIN))
        seen["disk_flushes"] += len(core.flushes.take_done())
        holds = core.reloads.holds.values()
        seen["landed"] += any(hold.node is not None for hold in holds)
        seen["samples"] += any(hold.sampled and not hold.started for hold in holds)
        seen["second_parts"] += any(hold.sampled and hold.started for hold in holds)

    def _end(self, failing: float) -> None:
        core, worker = self.core, self.worker
        core.end_tick()
        worker.submit(core.take_commands())
        worker.poison()
        ranks, whole = len(self.scenario.lanes), self.scenario.whole
        # with whole pages every rank takes part in every copy, and one that fails is enough for all
        worker.work(self.own, self.speed, failing * (min(1.0, 4 / ranks) if whole else 1.0))
        if worker.disk and self.own.random() < 0.2 / ranks:  # collected, or found to be damaged: on this rank only
            del worker.disk[self.own.choice(list(worker.disk))]
        if self.tick % self.scenario.check_every == 0:
            core.check()
            worker.check()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        shared, core = self.shared, self.core
        for request in list(self.requests):
            chance = shared.random()
            if chance < 0.04:
                self._drop(request)
                self.requests.remove(request)
            elif request.run is not None:
                if self._run(request, request.run):
                    self._drop(request)
                    self.requests.remove(request)
            elif request.hold is None or request.hold.done:
                self._admit(request)
        while len(self.requests) < 7 and shared.random() < 0.6:
            self._arrive()
        if shared.random() < 0.08:
            core.flush(shared.choice([("l1",), ("l2",), ("l1", "l2"), ("l1", "l2")]))
        if self.scenario.disk and shared.random() < 0.01:
            core.flush_disk(self.tick)

    def _arrive(self) -> None:
        shared = self.shared
        hashes = prompt_hashes(shared.randrange(4), shared.choice([2, 9, 31, 32, 40, 60]), shared.randrange(60))
        request = Request(self.next_id, hashes)
        self.next_id += 1
        self.hold(request)
        self.requests.append(request)

    def hold(self, request: Request) -> None:
        """Its pages on disk are asked for."""
        request.hold = self.core.hold(request.seq_id, request.hashes, len(request.hashes) - 1)

    def _admit(self, request: Request) -> None:
        core, hashes = self.core, request.hashes
        found = core.probe(hashes, len(hashes) - 1)
        first = min(len(hashes) - found.in_l1, max(8, found.end - found.in_l1))
        if not core.has_room_to_open(hashes, found.in_l1, first, 0):
            return
        request.run = core.open(request.seq_id, hashes, len(hashes) - 1)
        assert request.run.num_cached == found.end, "there was room, and not all that is cached was taken"
        if request.hold is not None:
            core.release(request.hold)
            request.hold = None

    def _run(self, request: Request, run: PageRun) -> bool:
        """A chunk of the prompt; True: all of it is there."""
        shared, core, hashes = self.shared, self.core, request.hashes
        self.worker.check_run(run, hashes)
        if len(run.pages) == run.num_cached:
            core.adopt(run, hashes, len(hashes) - 1)
        count = min(shared.randint(1, 20), len(hashes) - len(run.pages))
        if not core.has_room(run, count, 0) or not core.allocate(run, count):
            if shared.random() < 0.3:  # preempted
                core.close(run)
                request.run = None
            return False
        ready = hashes[run.num_cached : shared.randint(run.num_cached, len(run.pages))]
        self.worker.write(run, ready, run.num_cached)
        core.commit(run, ready)
        return run.num_cached == len(hashes) and shared.random() < 0.5

    def _drop(self, request: Request) -> None:
        if request.hold is not None:
            self.core.release(request.hold)
        if request.run is not None:
            self.core.close(request.run)

    def _settled(self) -> Summary:
        """Nothing is left: no page, frame, buffer or operation."""
        core, worker = self.core, self.worker
        core.check()
        worker.check()
        core.flush(("l1", "l2"))
        core.check()
        worker.poison()
        assert core.in_flight == 0 == core.num_nodes
        assert not core.spills.listed
        assert not core.take_commands()
        assert not worker.jobs
        assert not self.reported
        assert all(lane.free == lane.total for lane in (*core.lanes(), *core.l2_lanes())), "a page or frame has leaked"
        assert set(worker.l1) | set(worker.l2) == {POISON}
        return asdict(core.counters) | self.seen


class RankProcess:
    """A rank in a process of its own, whose strings and bytes hash by `hash_seed`; used like what `turns` gives."""

    def __init__(self, lane: int, scenario: Scenario, hash_seed: int) -> None:
        words = [lane, scenario.owners, scenario.seed, scenario.ticks, scenario.policy]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cache_ranks", *map(str, words)],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __next__(self) -> Answer:
        """Its answer. Raises StopIteration with the summary when it is through, AssertionError when it has died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"a rank's process has ended with {self._process.wait()}"
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise StopIteration(answer)
        return answer[0], answer[1]

    def send(self, least: list[int]) -> Answer:
        """The minimum over all ranks, for the next answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(least) + "\n")
        self._process.stdin.flush()
        return next(self)

    def close(self) -> None:
        """End the process, if it has not ended by itself."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()


def run_in_step(ranks: Sequence[Turns | RankProcess]) -> Summary:
    """All ranks to their ends, a tick at a time; their digests must be equal in each."""
    answers = [next(rank) for rank in ranks]
    ticks = 0
    while True:
        ticks += 1
        assert len({digest for _, digest in answers}) == 1, f"tick {ticks}: the cores have parted"
        least = minimum(vector for vector, _ in answers)
        ends: list[Summary] = []
        answers = []
        for rank in ranks:
            try:
                answers.append(rank.send(least))
            except StopIteration as end:
                ends.append(end.value)
        if ends:
            assert not answers, "some ranks are through, others are not"
            assert all(end == ends[0] for end in ends)
            return ends[0]


def run_together(scenario: Scenario) -> Summary:
    """All ranks in this process."""
    return run_in_step([Rank(rank, scenario).turns() for rank in range(len(scenario.lanes))])


def minimum(vectors: Iterable[list[int]]) -> list[int]:
    """Element by element."""
    return [min(values) for values in zip(*vectors, strict=True)]


def main() -> None:
    """One rank in a process of its own."""
    lane, owners, seed, ticks = map(int, sys.argv[1:5])
    turns = Rank(lane, Scenario(owners, seed, ticks, sys.argv[5])).turns()
    answer: Answer | Summary = next(turns)
    while not isinstance(answer, dict):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        try:
            answer = turns.send(json.loads(sys.stdin.readline()))
        except StopIteration as end:
            answer = end.value
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
