"""L2 beside the scheduler: when a hit joins the batch, what an abort leaves, and which part of a copy a rank gets."""

from collections.abc import Callable

import pytest

from benthic.engine.core import EAGER_S
from benthic.engine.tier_workers import TierWorkers
from benthic.kvcache import InvariantError
from benthic.kvcache.commands import DONE, Backup, LoadBack, Stream
from benthic.messages import Abort, FlushCache, FlushDone
from tests.support.engine_driver import Driver
from tests.support.fake_runner import FakeDevice, greedy
from tests.support.fake_tiers import FakeCopies, Truth, Weather
from tests.support.tier_workload import prompt_of

PROMPT = prompt_of(33)  # 8 pages and a token


def with_host(*, copy_ticks: int = 0, backup_fails: float = 0.0, l2_frames: int = 64, **options: object) -> Driver:
    weather = Weather(copy_ticks=(copy_ticks, copy_ticks), backup_fails=backup_fails)
    return Driver(l2_frames=l2_frames, weather=weather, **options)  # type: ignore[arg-type]


def in_l2_alone(d: Driver, prompt: list[int], request_id: int = 100) -> None:
    """The prompt has been served, and L1 has let it go."""
    d.run(d.submit(request_id, prompt, max_tokens=1))
    d.run(FlushCache(request_id, ("l1",)))
    assert d.core.lanes()[0].cached == 0
    assert d.core.l2_lanes()[0].cached >= len(prompt) // d.page_size


def tick_until(d: Driver, condition: Callable[[], bool], max_ticks: int = 200) -> None:
    for _ in range(max_ticks):
        if condition():
            return
        d.tick()
    raise AssertionError(f"not in {max_ticks} ticks")


def test_a_hit_in_l2_joins_at_once_when_alone_and_its_forward_waits_for_the_load_back():
    d = with_host(copy_ticks=9)
    in_l2_alone(d, PROMPT)
    d.tick(d.submit(1, PROMPT))
    step = d.runner.steps[-1]
    assert step.tick == d.engine.tick_count
    assert step.positions.tolist() == [32]  # only the last token is computed
    assert d.core.loading_back
    d.run()
    assert d.seen[1].tokens == greedy(PROMPT, 4)
    assert d.seen[1].by_tier == (0, 32, 0)
    d.assert_no_leak()


def test_a_hit_in_l2_beside_running_decodes_joins_when_its_load_back_has_settled():
    d = with_host(copy_ticks=9)
    in_l2_alone(d, PROMPT)
    d.tick(d.submit(1, prompt_of(9, 2), max_tokens=40))
    tick_until(d, lambda: len(d.seen[1].tokens) > 2)
    d.tick(d.submit(2, PROMPT))
    waited = 0
    while d.core.loading_back:
        step = d.runner.steps[-1]
        assert step.tick == d.engine.tick_count, "the decode goes on meanwhile"
        assert step.num_tokens == step.num_decode == 1
        d.tick()
        waited += 1
    assert waited >= 8
    assert d.seen[2].computed == 1, "it joined in the tick that settled it"
    d.run()
    assert d.seen[1].tokens == greedy(prompt_of(9, 2), 40)
    assert d.seen[2].tokens == greedy(PROMPT, 4)
    assert d.seen[2].by_tier == (0, 32, 0)
    d.assert_no_leak()


def test_a_shared_prefix_in_l2_is_loaded_back_once_for_all_who_bring_it():
    d = with_host(copy_ticks=5)
    in_l2_alone(d, PROMPT)
    d.run(*(d.submit(i, PROMPT, choice=i) for i in range(4)))
    assert all(d.seen[i].tokens == greedy(PROMPT, 4) for i in range(4))
    assert d.core.counters.loaded_back == 8
    assert [d.seen[i].by_tier for i in range(4)] == [(0, 32, 0)] + [(32, 0, 0)] * 3  # L1 has it from the first on
    assert d.engine.scheduler.totals.cached_tokens_l2 == 32
    d.assert_no_leak()


@pytest.mark.parametrize("ticks_before", range(12))
def test_an_abort_beside_copies_in_flight_leaves_nothing_and_loses_nothing(ticks_before):
    d = with_host(copy_ticks=6)
    in_l2_alone(d, PROMPT)
    longer = PROMPT + prompt_of(30, 7)
    d.tick(d.submit(1, longer, max_tokens=9))  # a load-back, then backups
    for _ in range(ticks_before):
        d.tick()
    assert d.core.busy
    d.run(Abort((1,)))
    d.run(d.submit(2, longer, max_tokens=9))
    assert d.seen[2].tokens == greedy(longer, 9)
    assert d.seen[2].cached >= 32
    d.assert_no_leak()


def test_a_failed_backup_costs_its_copy_alone_and_is_tried_again_at_a_hit():
    d = with_host(backup_fails=1.0)
    d.run(d.submit(1, PROMPT, max_tokens=1))
    assert d.core.counters.backup_failed == 8
    assert d.core.l2_lanes()[0].free == 64
    d.run(d.submit(2, PROMPT, max_tokens=1))
    assert d.seen[2].by_tier == (32, 0, 0)
    assert d.core.counters.backup_failed == 16
    d.assert_no_leak()


def test_a_decode_without_room_waits_for_copies_before_it_preempts():
    """Pages under a copy are free soon: nobody is thrown out for them."""
    d = with_host(l1_pages=10, max_running=2, copy_ticks=20, l1_free_pages=0, max_request_tokens=40)
    d.tick(d.submit(1, prompt_of(17, 1), max_tokens=1))  # cached and under a backup for a while
    tick_until(d, lambda: d.seen[1].finished is not None)
    d.run(d.submit(2, prompt_of(17, 2), max_tokens=12))
    assert d.engine.scheduler.totals.preemptions == 0
    assert d.seen[2].tokens == greedy(prompt_of(17, 2), 12)
    d.assert_no_leak()


def test_preemptions_come_back_through_l2_and_count_nothing_of_their_own():
    d = with_host(l1_pages=12, max_running=6, chunk_tokens=8, l1_free_pages=0, max_request_tokens=48, copy_ticks=2)
    prompts = {i: prompt_of(9 + i % 5, i) for i in range(12)}
    d.run(*(d.submit(i, p, max_tokens=24) for i, p in prompts.items()))
    assert d.engine.scheduler.totals.preemptions > 5
    assert d.core.counters.loaded_back > 0
    assert all(d.seen[i].tokens == greedy(p, 24) for i, p in prompts.items())
    assert all(d.seen[i].by_tier == (0, 0, 0) for i in prompts)
    d.assert_no_leak()


def test_a_flush_beside_copies_says_what_it_kept():
    d = with_host(copy_ticks=6)
    d.tick(d.submit(1, PROMPT, max_tokens=1))
    tick_until(d, lambda: d.seen[1].finished is not None)
    d.tick(FlushCache(5))
    done = next(r for r in d.replies if isinstance(r, FlushDone))
    assert done.kept["l1"] > 0
    assert done.kept["l2"] > 0
    assert done.dropped["l1"] + done.kept["l1"] == 8
    d.run(FlushCache(6))
    d.run(FlushCache(7))
    last = [r for r in d.replies if isinstance(r, FlushDone)][-1]
    assert last.kept == {"l1": 0, "l2": 0}
    d.assert_no_leak()


def test_ticks_go_on_eagerly_while_copies_are_under_way_and_nothing_is_computed():
    d = with_host(copy_ticks=10)
    d.tick(d.submit(1, PROMPT, max_tokens=1))
    assert d.engine.computing
    assert d.engine.pause_s == 0.0
    tick_until(d, lambda: not d.engine.computing)
    d.tick()
    assert not d.engine.idle
    assert d.core.busy
    assert d.engine.pause_s == EAGER_S
    d.run()
    assert d.engine.idle
    assert d.core.in_flight == 0


def test_a_load_back_that_a_rank_reports_as_failed_ends_the_engine():
    """A forward stands on it: nothing soft is left to do."""
    d = with_host(copy_ticks=9)
    in_l2_alone(d, PROMPT)
    d.tick(d.submit(1, PROMPT))
    (op,) = d.core.state.ops.of(Stream.LOADBACK)
    d.engine.workers.seen[op] = 1
    with pytest.raises(InvariantError, match="a forward may stand on it"):
        d.tick()


def test_of_a_copy_a_rank_gets_its_own_pages_and_reports_done_where_it_has_none():
    device = FakeDevice(8, 4, 1, num_ranks=2)
    copies = FakeCopies(device, 1, 8, Weather(), Truth())
    workers = TierWorkers(rank=1, num_owners=2, copies=copies)
    hooks = workers.step_hooks(())
    assert hooks is not None
    hooks.end(False)
    device.kv[1] = range(32)
    workers.submit([Backup(op=1, first=4, pages=(0, 2, 1, 3), frames=(7, 6, 5, 4))])  # pages 5 and 7 are ours
    copies.advance()
    assert copies.frames[6].tolist() == [8, 9, 10, 11]
    assert copies.frames[4].tolist() == [12, 13, 14, 15]
    assert (copies.frames[[5, 7]] < 0).all()
    workers.submit([LoadBack(op=2, first=2, frames=(6,), pages=(5,)), LoadBack(op=3, first=3, frames=(6,), pages=(5,))])
    assert workers.seen == {2: DONE}
    copies.advance()
    workers.poll()
    assert workers.seen == {1: DONE, 2: DONE, 3: DONE}
    assert device.kv[1, 20:24].tolist() == [8, 9, 10, 11]
    workers.forget([1, 3])
    assert workers.seen == {2: DONE}
