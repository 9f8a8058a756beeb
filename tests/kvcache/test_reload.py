"""Requests held for pages of the disk: what is read, what of it enters the tree, bounds, deadlines, and who waits."""

from benthic.kvcache import CoreConfig, Hold, Stream
from benthic.kvcache.commands import DONE, FAILED, Backup, Drain, LoadBack, Lookup, Reload, Spill, Touch
from benthic.kvcache.reload import Phase
from benthic.kvcache.state import WRITE_THROUGH, WRITE_THROUGH_SELECTIVE
from tests.support.core_driver import CoreDriver, branch, prompt

TIMEOUT_US = 10_000


def driver(
    policy: str = WRITE_THROUGH,
    *,
    owners: int = 1,
    l1: int = 128,
    l2: int = 128,
    inflight: int = 4,
    least: int = 1,
    marks: bool = True,
    sample: int = 16,
) -> CoreDriver:
    config = CoreConfig(
        num_owners=owners,
        l1_pages=l1,
        l1_free_pages=0,
        l2_frames=l2,
        policy=policy,
        disk=True,
        staging_frames=32,
        reload_max_inflight=inflight,
        reload_min_pages=least,
        reload_timeout_us=TIMEOUT_US,
        reload_marks=marks,
        reload_sample_pages=sample,
    )
    return CoreDriver(config)


def hold(d: CoreDriver, hashes: list[bytes]) -> Hold:
    """A request that is held."""
    d.next_id += 1
    held = d.core.hold(d.next_id, hashes, len(hashes))
    assert held is not None
    return held


def reading(d: CoreDriver, hashes: list[bytes], vouched: int | None = None) -> tuple[Hold, Reload]:
    """A request whose reload is under way, after a look-up that vouches for so many pages."""
    held = hold(d, hashes)
    d.tick()
    lookup = d.last(Lookup)
    d.tick((lookup.op, 1 + (len(lookup.hashes) if vouched is None else vouched)))
    return held, d.last(Reload)


def held_frames(d: CoreDriver) -> list[int]:
    return d.core.reloads.held_frames


# --- exactly what is agreed -------------------------------------------------------------------------------------------


def test_exactly_the_pages_that_all_can_vouch_for_are_read_and_those_verified_inserted() -> None:
    d = driver(owners=2)
    held, reload = reading(d, prompt(1, 20), vouched=15)
    assert (reload.first, reload.hashes, len(reload.frames)) == (0, tuple(prompt(1, 15)), 15)
    assert (held.done, d.free()[1], held_frames(d)) == (False, 256 - 15, [8, 7])
    d.tick((reload.op, 1 + 11))
    assert (held.done, held.landed_first, held.landed_end) == (True, 0, 11)
    assert (d.found(prompt(1, 20)), d.free()[1], held_frames(d)) == ((0, 11), 256 - 11, [6, 5])
    assert d.core.counters.reloaded == 11


def test_what_has_landed_is_locked_until_the_request_is_admitted() -> None:
    d = driver()
    held, reload = reading(d, prompt(1, 20))
    d.tick((reload.op, 1 + 20))
    assert d.core.flush().kept == {"l1": 0, "l2": 20}
    run = d.open(prompt(1, 20))
    d.core.release(held)
    assert (run.num_cached, len(d.last(LoadBack).pages), held_frames(d)) == (20, 20, [0])
    d.close(run)
    d.settle()
    assert sum(d.core.flush().dropped.values()) == 40


def test_reloaded_pages_count_as_on_disk_and_are_not_spilled_again() -> None:
    d = driver()
    held, reload = reading(d, prompt(1, 20))
    d.tick((reload.op, 1 + 20))
    d.core.release(held)
    d.tick()
    assert d.core.in_flight == 0
    assert all(node.durable for node in d.core.state.tree.nodes.values())


def test_pages_that_lie_in_another_owners_file_enter_unmarked_and_are_spilled() -> None:
    d = driver(marks=False)
    _, reload = reading(d, prompt(1, 20))
    d.tick((reload.op, 1 + 20))
    assert [node.durable for node in d.core.state.tree.nodes.values()] == [False]
    assert d.last(Spill).hashes == tuple(prompt(1, 20))


def test_nothing_on_disk_or_nothing_verified_lets_the_request_compute() -> None:
    d = driver()
    held = hold(d, prompt(1, 20))
    d.tick()
    d.tick((d.last(Lookup).op, 1))
    assert (held.done, d.given(Reload)) == (True, [])
    other, reload = reading(d, prompt(2, 20))
    d.tick((reload.op, 1))
    assert (other.done, other.node, d.free()[1], d.core.num_nodes) == (True, None, 128, 0)


def test_what_is_in_memory_is_not_looked_up() -> None:
    d = driver()
    d.serve(prompt(1, 12))
    d.settle()
    held, reload = reading(d, branch(1, 12, 20))
    assert (d.last(Lookup).first, reload.first, len(reload.frames)) == (12, 12, 8)
    d.tick((reload.op, 1 + 8))
    assert (held.landed_first, held.landed_end) == (12, 20)


def test_an_attach_point_inside_a_node_splits_it() -> None:
    d = driver()
    d.serve(prompt(1, 12))
    d.settle()
    _, reload = reading(d, branch(1, 5, 9))
    d.tick((reload.op, 1 + 4))
    assert (d.found(branch(1, 5, 9)), d.found(prompt(1, 12))) == ((5, 9), (12, 12))


# --- what the tree has gained meanwhile -------------------------------------------------------------------------------


def test_pages_that_have_a_copy_by_now_need_no_second_one() -> None:
    d = driver()
    _, reload = reading(d, prompt(1, 20))
    d.serve(branch(1, 12, 14))
    d.settle(Stream.BACKUP)
    d.tick((reload.op, 1 + 20))
    assert d.found(prompt(1, 20)) == (12, 20)
    assert d.free()[1] == 128 - 22


def test_pages_without_a_copy_take_the_frames() -> None:
    d = driver(WRITE_THROUGH_SELECTIVE)
    _, reload = reading(d, prompt(1, 20))
    d.serve(branch(1, 12, 14))
    d.tick((reload.op, 1 + 20))
    node = d.core.state.tree.find(prompt(1, 20)[0])
    assert node is not None
    assert node.l2 is not None
    assert (node.l2.pages, node.durable) == (reload.frames[:12], True)
    assert d.free()[1] == 128 - 20
    assert d.last(Touch).hashes == node.hashes, "on disk they are as young as in memory"
    d.core.flush(["l1"])
    assert d.found(prompt(1, 20)) == (0, 20)


def test_behind_pages_whose_backup_is_pending_nothing_is_inserted() -> None:
    d = driver()
    held, reload = reading(d, prompt(1, 20))
    d.serve(branch(1, 12, 14))
    backup = d.given(Backup)[0]
    d.tick((reload.op, 1 + 20))
    assert (d.found(prompt(1, 20)), d.free()[1], held.done, held.node) == ((12, 12), 128 - 14, True, None)
    d.tick((backup.op, FAILED))
    assert d.core.counters.backup_failed == 14


def test_all_of_it_being_there_already_frees_all_frames() -> None:
    d = driver()
    held, reload = reading(d, prompt(1, 20))
    d.serve(prompt(1, 30))
    d.settle(Stream.BACKUP)
    d.tick((reload.op, 1 + 20))
    assert (d.free()[1], held.landed_end, d.core.counters.reloaded) == (128 - 30, 20, 0)


# --- the attach point -------------------------------------------------------------------------------------------------


def test_an_attach_point_in_l1_alone_is_backed_up_first() -> None:
    d = driver(WRITE_THROUGH_SELECTIVE)
    d.serve(prompt(1, 12))
    held = hold(d, branch(1, 10, 20))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 10))
    assert d.given(Reload) == []
    backup = d.last(Backup)
    assert (backup.first, len(backup.pages)) == (0, 10)
    commands = d.tick((backup.op, DONE))
    assert any(isinstance(c, Reload) for c in commands), "in the tick that settles it"
    d.tick((d.last(Reload).op, 1 + 10))
    assert (held.landed_first, held.landed_end) == (10, 20)


def test_a_pending_backup_of_the_attach_point_is_waited_for() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    hold(d, branch(1, 10, 20))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 10))
    assert (len(d.given(Backup)), d.given(Reload)) == (1, [])
    assert any(isinstance(c, Reload) for c in d.tick((d.last(Backup).op, DONE)))


def test_without_a_copy_of_the_attach_point_there_is_no_reload() -> None:
    d = driver(WRITE_THROUGH_SELECTIVE)
    d.serve(prompt(1, 12))
    held = hold(d, branch(1, 10, 20))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 10))
    d.tick((d.last(Backup).op, FAILED))
    assert (held.done, d.given(Reload), len(d.given(Backup))) == (True, [], 1)


def test_without_frames_for_the_attach_point_there_is_no_reload() -> None:
    d = driver(WRITE_THROUGH_SELECTIVE, l2=8)
    d.serve(prompt(1, 12))
    held = hold(d, branch(1, 10, 20))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 10))
    assert (held.done, d.given(Reload), d.given(Backup)) == (True, [], [])


def test_the_attach_path_stays_in_l2_until_the_insert() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.settle()
    _, reload = reading(d, branch(1, 10, 20))
    assert d.core.flush().kept == {"l1": 0, "l2": 10}
    d.tick((reload.op, 1 + 10))
    assert d.found(branch(1, 10, 20)) == (0, 20)


# --- frames -----------------------------------------------------------------------------------------------------------


def test_reloads_hold_at_most_half_of_a_lane() -> None:
    d = driver(owners=2, l2=20)
    held, reload = reading(d, prompt(1, 40))
    assert (len(reload.frames), held_frames(d)) == (20, [10, 10])
    other = hold(d, prompt(2, 4))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 4))
    assert (other.done, len(d.given(Reload))) == (True, 1), "no half is left: it computes"
    d.tick((reload.op, 1 + 20))
    assert held_frames(d) == [10, 10], "landed counts as well"
    d.core.release(held)
    assert held_frames(d) == [0, 0]


def test_half_of_each_lane_counts_not_of_all() -> None:
    d = driver(owners=4, l2=5)
    d.serve(prompt(1, 3))
    d.settle()
    _, reload = reading(d, prompt(2, 40))
    assert held_frames(d) == [2, 2, 2, 2]
    assert len(reload.frames) == 8


def test_where_fewer_frames_can_be_had_fewer_pages_are_read() -> None:
    d = driver(l2=32)
    d.serve(prompt(1, 24))  # its backup is pending: locked
    _, reload = reading(d, prompt(2, 20))
    assert len(reload.frames) == 8
    d.tick((reload.op, 1 + 8))
    assert d.found(prompt(2, 20)) == (0, 8)


def test_below_the_least_a_reload_is_not_worth_it() -> None:
    d = driver(l2=32, least=9)
    assert d.core.hold(99, prompt(1, 8), 8) is None
    d.serve(prompt(1, 24))
    held = hold(d, prompt(2, 20))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 20))
    assert (held.done, d.given(Reload)) == (True, [])


def test_room_is_made_by_plan() -> None:
    d = driver(l2=32)
    d.serve(prompt(1, 32))
    d.settle()
    _, reload = reading(d, prompt(2, 16))
    assert (len(reload.frames), d.core.counters.evicted_l2) == (16, 32)


# --- following --------------------------------------------------------------------------------------------------------


def test_a_request_whose_first_missing_page_is_being_read_follows_and_looks_again() -> None:
    d = driver()
    first, reload = reading(d, prompt(1, 20))
    second = hold(d, branch(1, 12, 16))
    third = hold(d, prompt(1, 20))
    d.tick()
    assert [h.phase for h in (first, second, third)] == [Phase.READING, Phase.FOLLOWING, Phase.FOLLOWING]
    assert len(d.given(Lookup)) == 1
    d.tick((reload.op, 1 + 20))
    assert [h.phase for h in (first, second, third)] == [Phase.DONE, Phase.LOOKUP, Phase.DONE]
    assert d.last(Lookup).first == 12
    d.tick((d.last(Lookup).op, 1 + 4))
    d.tick((d.last(Reload).op, 1 + 4))
    assert (second.landed_first, second.landed_end, d.found(branch(1, 12, 16))) == (0, 16, (0, 16))


def test_what_landed_counts_until_the_last_that_uses_it_has_gone() -> None:
    d = driver()
    first, reload = reading(d, prompt(1, 20))
    second = hold(d, prompt(1, 12))
    d.tick()
    d.tick((reload.op, 1 + 20))
    d.core.release(first)
    assert held_frames(d) == [20]
    assert d.core.flush(["l2"]).kept == {"l2": 12}
    d.core.release(second)
    assert held_frames(d) == [0]
    assert d.core.flush(["l2"]).dropped == {"l2": 12}


def test_the_pages_of_a_reload_whose_starter_is_gone_are_inserted_unlocked() -> None:
    d = driver()
    held, reload = reading(d, prompt(1, 20))
    d.core.release(held)
    assert d.core.in_flight == 1
    d.tick((reload.op, 1 + 20))
    assert (d.found(prompt(1, 20)), held_frames(d)) == ((0, 20), [0])
    assert d.core.flush().dropped == {"l1": 0, "l2": 20}


def test_followers_get_what_a_starter_that_is_gone_has_ordered() -> None:
    d = driver()
    held, reload = reading(d, prompt(1, 20))
    follower = hold(d, prompt(1, 20))
    d.tick()
    d.core.release(held)
    d.tick((reload.op, 1 + 20))
    assert (follower.done, follower.landed_end) == (True, 20)
    assert d.core.flush().kept == {"l1": 0, "l2": 20}


def test_a_candidate_beyond_the_bound_waits_its_turn() -> None:
    d = driver(inflight=1)
    _, reload = reading(d, prompt(1, 20))
    second = hold(d, prompt(2, 20))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 20))
    assert (second.phase, len(d.given(Reload))) == (Phase.QUEUED, 1)
    d.tick((reload.op, 1 + 20))
    assert second.phase is Phase.READING


def test_a_request_starts_one_reload_at_most() -> None:
    d = driver()
    held, reload = reading(d, prompt(1, 20))
    d.tick((reload.op, 1 + 7))
    d.tick()
    assert (held.done, len(d.given(Reload)), len(d.given(Lookup))) == (True, 1, 1)


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_past_its_deadline_a_reload_settles_and_its_frames_drain() -> None:
    d = driver(owners=2)
    held, reload = reading(d, prompt(1, 20))
    late = TIMEOUT_US + 20 * 1_000 + 1
    assert d.core.overdue(d.now_us + late - 1) == ()
    assert d.core.overdue(d.now_us + late) == (reload.op,)
    d.tick((reload.op, 1 + 5), us=late)
    drain = d.last(Drain)
    assert (drain.reload, held.done, d.found(prompt(1, 20))) == (reload.op, True, (0, 5))
    assert (d.free()[1], held_frames(d)) == (256 - 20, [7, 8]), "out of use, and counted"
    d.core.flush()
    assert (d.free()[1], held_frames(d)) == (256 - 15, [7, 8])
    d.tick((drain.op, DONE))
    assert (d.free()[1], held_frames(d), d.core.in_flight) == (256, [0, 0], 0)
    assert d.core.counters.reload_timeouts == 1


def test_the_deadline_grows_with_the_pages_and_the_rate() -> None:
    d = driver()
    held = hold(d, prompt(1, 20))
    d.tick()
    d.ticks += 1
    d.now_us += 1_000
    ends = [(d.last(Lookup).op, 1 + 20)]
    d.core.begin_tick(d.ticks, d.now_us, [], read_us_per_page=5_000, compute_us_per_page=9_000)
    d.tick(*ends, us=0)
    d.core.state.read_us_per_page = 5_000
    other = hold(d, prompt(2, 10))
    assert other.bound_us == d.now_us + TIMEOUT_US + 10 * 2 * 5_000
    assert held.bound_us == TIMEOUT_US + 20 * 1_000


def test_a_lookup_past_its_deadline_lets_the_request_compute() -> None:
    d = driver()
    held = hold(d, prompt(1, 20))
    d.tick()
    (lookup,) = d.core.overdue(d.now_us + TIMEOUT_US + 1)
    d.tick((lookup, 1), us=TIMEOUT_US + 1)
    assert (held.done, d.given(Reload), d.core.in_flight) == (True, [], 0)


def test_past_its_bound_a_request_computes_whatever_it_waits_for() -> None:
    d = driver(inflight=1)
    reading(d, prompt(1, 20))
    waiting = hold(d, prompt(2, 20))
    d.tick()
    assert not waiting.done
    d.tick(us=TIMEOUT_US + 20 * 1_000 + 1)
    assert waiting.done
    assert d.core.counters.reload_timeouts == 2, "the starter's bound is over as well"


def test_what_has_landed_is_unlocked_at_the_bound() -> None:
    d = driver()
    held, reload = reading(d, prompt(1, 20))
    d.tick((reload.op, 1 + 20))
    d.tick(us=TIMEOUT_US + 20 * 1_000 + 1)
    assert (held.node, held_frames(d)) == (None, [0])
    assert d.core.flush(["l2"]).dropped == {"l2": 20}


def test_where_drains_alone_fill_the_bound_requests_compute() -> None:
    d = driver(inflight=1)
    waiting, reload = reading(d, prompt(1, 20))
    queued = hold(d, prompt(2, 20))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 20), us=0)
    assert not queued.done
    d.tick((reload.op, 1), us=TIMEOUT_US + 21_000)
    assert len(d.given(Drain)) == 1
    assert waiting.done
    assert d.core.hold(99, prompt(3, 20), 20) is None
    d.tick((d.last(Drain).op, DONE))
    assert d.core.hold(99, prompt(3, 20), 20) is not None


def test_one_in_the_queue_computes_when_drains_alone_fill_the_bound() -> None:
    d = driver(inflight=1)
    _, reload = reading(d, prompt(1, 2))
    queued = hold(d, prompt(2, 60))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 60))
    assert queued.phase is Phase.QUEUED
    d.tick((reload.op, 1), us=TIMEOUT_US + 5_000)
    assert d.now_us < queued.bound_us
    assert (queued.done, len(d.given(Reload)), len(d.given(Drain))) == (True, 1, 1)


def test_a_drain_counts_as_a_reload_in_flight() -> None:
    d = driver(inflight=2)
    _, late = reading(d, prompt(1, 2))
    d.tick((late.op, 1), us=TIMEOUT_US + 5_000)
    reading(d, prompt(2, 4))
    third = hold(d, prompt(3, 4))
    d.tick()
    d.tick((d.last(Lookup).op, 1 + 4))
    assert (third.phase, len(d.given(Reload))) == (Phase.QUEUED, 2)
    d.tick((d.last(Drain).op, DONE))
    assert third.phase is Phase.READING


def test_ticks_go_on_for_a_held_request_and_fast_while_it_can_go_on_at_once() -> None:
    d = driver()
    assert (d.core.busy, d.core.patient) == (False, True)
    held = hold(d, prompt(1, 20))
    assert (d.core.busy, d.core.patient) == (True, False), "its look-up comes with the next tick"
    d.tick()
    d.tick((d.last(Lookup).op, 1))
    assert (held.done, d.core.in_flight) == (True, 0)
    assert (d.core.busy, d.core.patient) == (True, False), "it waits to be admitted"
    d.core.release(held)
    assert (d.core.busy, d.core.patient) == (False, True)
