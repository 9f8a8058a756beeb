"""The cache core against a naive model, in random order, with several cores fed the same inputs."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benthic.kvcache import CacheCore, CoreConfig, PageRun
from tests.support.naive_cache import NaiveCache, NaiveRun, Prefix, hashes_of

LONGEST = 44  # pages: more than a node holds
# Few prompts, so that sequences meet: a short head of token pages, then its last one over and over.
heads = st.sampled_from([(0,), (1,), (0, 1), (0, 0, 0, 1), (0,) * 20 + (1,)])
lengths = st.sampled_from([1, 3, 10, 33, LONGEST])
limits = st.sampled_from([0, 2, 9, LONGEST])


class CoreAgainstModel(RuleBasedStateMachine):
    """Three cores get each call; the first is compared with the model, the others with the first."""

    @initialize(owners=st.sampled_from([1, 2, 4]), pages=st.integers(48, 80), low=st.integers(0, 6))
    def start(self, owners: int, pages: int, low: int) -> None:
        lane = pages // owners
        config = CoreConfig(num_owners=owners, l1_pages=lane, l1_free_pages=low)
        self.cores = [CacheCore(config) for _ in range(3)]
        self.model = NaiveCache(owners, lane)
        self.runs: dict[int, list[PageRun]] = {}
        self.next_id = 0
        self.tick = 0

    def on_all(self, call: Callable[[CacheCore, int], Any]) -> Any:
        """The same call on every core; all must answer alike."""
        answers = [call(core, index) for index, core in enumerate(self.cores)]
        assert all(answer == answers[0] for answer in answers[1:])
        return answers[0]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(list(self.runs)))

    @property
    def core(self) -> CacheCore:
        return self.cores[0]

    @rule(steps=st.integers(0, 2))
    def begin_tick(self, steps: int) -> None:
        self.tick += steps
        self.on_all(lambda core, _: core.begin_tick(self.tick))
        self.evict_to_watermark()

    @rule(head=heads, length=lengths, limit=limits)
    def open(self, head: Prefix, length: int, limit: int) -> None:
        self.open_run((head + head[-1:] * LONGEST)[:length], limit)

    def open_run(self, prompt: Prefix, limit: int) -> int:
        hashes = hashes_of(prompt)
        found = self.on_all(lambda core, _: core.probe(hashes, limit)).in_l1
        assert found == self.model.leading(prompt, limit) == self.core.probe(hashes, limit).end
        asked = [(pages, keep) for pages in (0, 1, 7, 30) for keep in (0, 3)]
        promised = [self.on_all(lambda core, _, a=a: core.has_room_to_open(hashes, found, *a)) for a in asked]
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.runs[seq_id] = [core.open(seq_id, hashes, limit) for core in self.cores]
        self.model.runs[seq_id] = NaiveRun(prompt)
        assert self.runs[seq_id][0].num_cached == self.model.leading(prompt, limit)
        assert promised == [self.on_all(lambda core, i, a=a: core.has_room(self.runs[seq_id][i], *a)) for a in asked]
        self.model.took_cached(seq_id, self.runs[seq_id][0])
        return seq_id

    @rule(head=heads, length=lengths, stays=st.booleans())
    def serve(self, head: Prefix, length: int, stays: bool) -> None:
        """A request from end to end, as the scheduler would run it."""
        prompt = (head + head[-1:] * LONGEST)[:length]
        seq_id = self.open_run(prompt, length)
        if self.allocate_pages(seq_id, length - self.model.runs[seq_id].num_cached, 0):
            self.commit_pages(seq_id, length - self.model.runs[seq_id].num_cached)
        if not stays:
            self.close_run(seq_id)

    @rule(head=heads, length=lengths, split_at=lengths)
    def race(self, head: Prefix, length: int, split_at: int) -> None:
        """Two sequences compute the same pages; the second to commit finds duplicates, perhaps after a split."""
        prompt = (head + head[-1:] * LONGEST)[:length]
        other = (*prompt[:split_at], 9)
        pair = [self.open_run(p, 0) for p in (prompt, other)]
        done = [self.allocate_pages(i, len(self.model.runs[i].prompt), 0) for i in pair]
        if all(done):
            for seq_id in pair:
                self.commit_pages(seq_id, len(self.model.runs[seq_id].prompt))
        self.agrees()
        for seq_id in pair:
            self.close_run(seq_id)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), limit=limits)
    def adopt(self, data: st.DataObject, limit: int) -> None:
        seq_id = self.pick(data)
        model = self.model.runs[seq_id]
        if len(model.pages) > model.num_cached:
            return
        hashes = hashes_of(model.prompt)
        expected = max(0, self.model.leading(model.prompt, limit) - model.num_cached)
        assert self.on_all(lambda core, i: core.adopt(self.runs[seq_id][i], hashes, limit)) == expected
        self.model.took_cached(seq_id, self.runs[seq_id][0])

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), keep=st.integers(0, 5))
    def allocate(self, data: st.DataObject, keep: int) -> None:
        seq_id = self.pick(data)
        model = self.model.runs[seq_id]
        missing = len(model.prompt) - len(model.pages)
        self.allocate_pages(seq_id, data.draw(st.one_of(st.just(missing), st.integers(0, missing))), keep)

    def allocate_pages(self, seq_id: int, num_pages: int, keep: int) -> bool:
        model = self.model.runs[seq_id]
        room = self.model.room(model, num_pages)
        fits = self.on_all(lambda core, i: core.has_room(self.runs[seq_id][i], num_pages, keep))
        assert fits == all(pages >= keep for pages in room)
        free = [lane.free for lane in self.core.lanes()]
        before, evicted = self.core.digest(), self.core.counters.evicted_l1
        done = self.on_all(lambda core, i: core.allocate(self.runs[seq_id][i], num_pages))
        assert done == all(pages >= 0 for pages in room)
        gone = self.model.drop_evicted(self.core)
        assert self.core.counters.evicted_l1 - evicted == len(gone)
        if not done:
            assert self.core.digest() == before
        if min(free) >= num_pages:
            assert not gone
        self.model.allocated(seq_id, self.runs[seq_id][0])
        return bool(done)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        model = self.model.runs[seq_id]
        private = len(model.pages) - model.num_cached
        self.commit_pages(seq_id, data.draw(st.one_of(st.just(private), st.integers(0, private))))

    def commit_pages(self, seq_id: int, num_pages: int) -> None:
        model = self.model.runs[seq_id]
        hashes = hashes_of(model.prompt)[model.num_cached : model.num_cached + num_pages]
        replaced = self.on_all(lambda core, i: core.commit(self.runs[seq_id][i], hashes))
        assert replaced == self.model.committed(seq_id, self.runs[seq_id][0], num_pages)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.close_run(self.pick(data))

    def close_run(self, seq_id: int) -> None:
        self.on_all(lambda core, i: core.close(self.runs[seq_id][i]))
        del self.runs[seq_id], self.model.runs[seq_id]

    def evict_to_watermark(self) -> None:
        low = self.core.config.l1_free_pages
        was_low = any(lane.free < low for lane in self.core.lanes())
        before = self.core.counters.evicted_l1
        self.on_all(lambda core, _: core.evict_to_watermark())
        evicted = self.core.counters.evicted_l1 - before
        assert evicted == len(self.model.drop_evicted(self.core))
        assert was_low or not evicted
        assert all(lane.free >= low or lane.cached == lane.locked for lane in self.core.lanes())

    @precondition(lambda self: self.tick % 5 == 4)  # rarely, so that the cache fills up
    @rule()
    def flush(self) -> None:
        locked = len(self.model.locked())
        flushed = self.on_all(lambda core, _: core.flush())
        assert flushed.kept == {"l1": locked, "l2": 0}
        assert flushed.dropped == {"l1": len(self.model.drop_evicted(self.core)), "l2": 0}

    @invariant()
    def agrees(self) -> None:
        self.model.compare(self.core)
        self.core.check()
        digests = [core.digest() for core in self.cores]
        assert digests[0] == digests[1] == digests[2]

    def teardown(self) -> None:
        if not hasattr(self, "cores"):
            return
        for seq_id in list(self.runs):
            for core, run in zip(self.cores, self.runs[seq_id], strict=True):
                core.close(run)
        for core in self.cores:
            core.flush()
            core.check()
            assert all(lane.free == lane.total for lane in core.lanes()), "a page has leaked"
            assert core.num_nodes == 0


CoreAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCoreAgainstModel = CoreAgainstModel.TestCase
