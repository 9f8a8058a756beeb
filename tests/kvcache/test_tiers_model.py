"""L1, L2 and the disk against a naive model, in random order, over memory in which whatever is freed is poisoned."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benthic.kvcache import CacheCore, CoreConfig, Found, Hold, PageRun, Stream, agree
from benthic.kvcache.state import POLICIES
from tests.support.cache_ranks import minimum, prompt_hashes, reports
from tests.support.naive_tiers import NaiveTiers
from tests.support.tier_sim import POISON, Worker

heads = st.integers(0, 2)
lengths = st.sampled_from([1, 3, 12, 33, 40])
tails = st.sampled_from([0, 1, 3, 8])
seeds = st.integers(0, 1 << 30)


class TiersAgainstModel(RuleBasedStateMachine):
    """One core, a worker for each lane. Operations get on only in `work`, and settle only in `tick`."""

    @initialize(
        owners=st.sampled_from([1, 2, 3]),
        l1=st.integers(50, 80),
        l2=st.integers(60, 120),
        policy=st.sampled_from(POLICIES),
        low=st.integers(0, 3),
        min_pages=st.sampled_from([1, 1, 4]),
        marks=st.booleans(),
    )
    def start(self, owners: int, l1: int, l2: int, policy: str, low: int, min_pages: int, marks: bool) -> None:
        config = CoreConfig(
            num_owners=owners,
            l1_pages=l1 // owners,
            l1_free_pages=low,
            l2_frames=l2 // owners,
            policy=policy,
            disk=True,
            staging_frames=40 // owners,
            spill_max_inflight=4,
            reload_max_inflight=2,
            reload_timeout_us=2_000,
            reload_min_pages=min_pages,
            reload_marks=marks,
        )
        self.core = CacheCore(config)
        self.workers = [Worker(self.core, lane) for lane in range(owners)]
        self.model = NaiveTiers(self.core)
        self.runs: dict[int, tuple[PageRun, list[bytes]]] = {}
        self.holds: dict[int, tuple[Hold, list[bytes]]] = {}
        self.next_id = 0
        self.ticks = 0
        self.now_us = 0

    # --- time ---------------------------------------------------------------------------------------------------------

    @rule(seed=seeds, speed=st.sampled_from([0.2, 0.6, 1.0]), failing=st.sampled_from([0.0, 0.0, 0.3]))
    def work(self, seed: int, speed: float, failing: float) -> None:
        rng = random.Random(seed)
        for worker in self.workers:
            worker.work(rng, speed, failing)

    @rule(us=st.sampled_from([10, 500, 500, 500, 20_000, 100_000_000]))
    def tick(self, us: int) -> None:
        core = self.core
        self.ticks += 1
        self.now_us += us
        for worker in self.workers:
            worker.report_now(core.overdue(self.now_us))
        windows = core.windows()
        least = minimum(reports(windows, worker.seen) for worker in self.workers)
        agreed = agree(windows, {}, lambda _: least)
        for worker in self.workers:
            for end in agreed:
                del worker.seen[end.op]
        self.model.settled(agreed)
        core.begin_tick(self.ticks, self.now_us, agreed)
        core.end_tick()
        for hold, hashes in self.holds.values():
            if hold.node is not None:
                assert core.probe(hashes, hold.landed_end).end == hold.landed_end, "what has landed is locked"

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, head: int, length: int, tail: int) -> tuple[int, list[bytes]]:
        hashes = prompt_hashes(head, length, tail)
        self.model.learn(hashes)
        self.next_id += 1
        return self.next_id, hashes

    @rule(head=heads, length=lengths, tail=tails)
    def hold(self, head: int, length: int, tail: int) -> None:
        seq_id, hashes = self.request(head, length, tail)
        hold = self.core.hold(seq_id, hashes, len(hashes))
        if hold is not None:
            self.holds[seq_id] = (hold, hashes)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), gone=st.sampled_from([False, False, True]))
    def admit(self, data: st.DataObject, gone: bool) -> None:
        seq_id = data.draw(st.sampled_from(list(self.holds)))
        hold, hashes = self.holds[seq_id]
        if not gone and not hold.done:
            return
        if not gone:
            self.open_run(seq_id, hashes)
        self.core.release(hold)
        del self.holds[seq_id]

    def open_run(self, seq_id: int, hashes: list[bytes]) -> PageRun:
        self.sync()
        core = self.core
        expected = self.model.leading(hashes, len(hashes))
        assert core.probe(hashes, len(hashes)) == Found(*expected)
        in_l1, end = expected
        fits = core.has_room_to_open(hashes, in_l1, end - in_l1, 0)
        run = core.open(seq_id, hashes, len(hashes))
        self.runs[seq_id] = (run, hashes)
        self.sync()
        assert run.num_cached == (end if fits else in_l1)
        return run

    @rule(head=heads, length=lengths, tail=tails, part=st.sampled_from([0.5, 1.0, 1.0]), stays=st.booleans())
    def serve(self, head: int, length: int, tail: int, part: float, stays: bool) -> None:
        """A request, computed at once as far as `part` goes."""
        seq_id, hashes = self.request(head, length, tail)
        run = self.open_run(seq_id, hashes)
        self.compute(run, hashes, int((len(hashes) - run.num_cached) * part))
        if not stays:
            self.core.close(run)
            del self.runs[seq_id]

    @rule(head=heads, length=lengths, at=lengths)
    def race(self, head: int, length: int, at: int) -> None:
        """Two that found nothing compute the same pages; the second finds duplicates, perhaps in L2 alone."""
        seq_id, hashes = self.request(head, length, 0)
        other_id, others = self.request(head, min(at, length), 4)
        run, other = self.core.open(seq_id, hashes, 0), self.core.open(other_id, others, 0)
        self.compute(run, hashes, len(hashes))
        self.core.close(run)
        self.sync()
        self.core.flush(["l1"])
        self.sync()
        self.compute(other, others, len(others))
        self.core.close(other)

    def compute(self, run: PageRun, hashes: list[bytes], num_pages: int) -> None:
        core = self.core
        if not core.allocate(run, num_pages):
            return
        start, end = run.num_cached, run.num_cached + num_pages
        self.sync()
        for worker in self.workers:
            worker.write(run, hashes[start:end], start)
        core.commit(run, hashes[start:end])
        self.model.committed(hashes, start, end)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        run, hashes = self.runs[data.draw(st.sampled_from(list(self.runs)))]
        expected = self.model.leading(hashes, len(hashes))[0]
        assert self.core.adopt(run, hashes, len(hashes)) == max(0, expected - run.num_cached) or run.num_cached
        self.compute(run, hashes, min(8, len(hashes) - run.num_cached))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        run, _ = self.runs.pop(data.draw(st.sampled_from(list(self.runs))))
        self.core.close(run)

    @rule(tiers=st.sampled_from([("l1",), ("l2",), ("l1", "l2")]))
    def flush(self, tiers: tuple[str, ...]) -> None:
        before = {"l1": len(self.model.l1), "l2": len(self.model.l2) + sum(map(len, self.model.backups.values()))}
        flushed = self.core.flush(tiers)
        assert {t: flushed.dropped[t] + flushed.kept[t] for t in tiers} == {t: before[t] for t in tiers}
        self.sync()
        used = {"l1": self.model.used_l1(), "l2": self.model.used_l2()}
        assert flushed.kept == {t: len(used[t]) for t in tiers}

    @precondition(lambda self: self.ticks % 7 == 6)
    @rule()
    def flush_disk(self) -> None:
        self.core.flush_disk(self.ticks)

    # --- checks -------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Workers take what there is to do; memory and model follow."""
        commands = self.core.take_commands()
        self.model.told(commands)
        for worker in self.workers:
            worker.submit(commands)
            worker.poison()
        self.model.compare()

    @invariant()
    def right(self) -> None:
        if not hasattr(self, "core"):
            return
        self.sync()
        self.core.check()
        for worker in self.workers:
            worker.check()
            for run, hashes in self.runs.values():
                worker.check_run(run, hashes)
        for lane, held in zip(self.core.l2_lanes(), self.core.reloads.held_frames, strict=True):
            assert 0 <= held <= lane.total // 2, "reloads hold more than half of a lane"
        self.heads_are_young()

    def heads_are_young(self) -> None:
        """On disk no head is older than its tail, so that collecting leaves no tail without its head."""
        if self.core.state.ops.of(Stream.DURABLE):  # ages are on their way
            return
        ages = {page: age for worker in self.workers for page, age in worker.disk.items()}
        for page, age in ages.items():
            above = self.model.whole[page][:-1]
            if above and above[-1] in ages:
                assert ages[above[-1]] >= age, "a head is older than its tail"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        core = self.core
        for run, _ in self.runs.values():
            core.close(run)
        for hold, _ in self.holds.values():
            core.release(hold)
        self.holds = {}
        left = 0
        while core.busy:
            self.sync()
            self.work(left, 1.0, 0.0)
            self.tick(500)
            left += 1
            assert left < 300, f"still busy: {core.windows()}"
        self.sync()
        core.flush()
        self.sync()
        core.check()
        assert core.num_nodes == 0
        assert all(lane.free == lane.total for lane in (*core.lanes(), *core.l2_lanes())), "a page or frame has leaked"
        assert all(set(worker.l1) | set(worker.l2) == {POISON} for worker in self.workers)


TiersAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestTiersAgainstModel = TiersAgainstModel.TestCase
