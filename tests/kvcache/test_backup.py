"""Copies between L1 and L2: when they are made, what a split or a failure does to them, what protects both ends."""

import pytest

from benthic.kvcache import CoreConfig, InvariantError, Stream
from benthic.kvcache.commands import DONE, FAILED, Backup, LoadBack
from benthic.kvcache.state import WRITE_BACK, WRITE_THROUGH, WRITE_THROUGH_SELECTIVE
from tests.support.core_driver import CoreDriver, branch, prompt


def driver(
    policy: str = WRITE_THROUGH, *, owners: int = 1, l1: int = 128, l2: int = 128, low: int = 0, hits: int = 2
) -> CoreDriver:
    return CoreDriver(
        CoreConfig(num_owners=owners, l1_pages=l1, l1_free_pages=low, l2_frames=l2, policy=policy, selective_hits=hits)
    )


def in_l2_only(d: CoreDriver, hashes: list[bytes]) -> None:
    """Served, copied, and gone from L1."""
    d.serve(hashes)
    d.settle()
    d.core.flush(["l1"])
    assert d.found(hashes) == (0, len(hashes))


# --- backups ----------------------------------------------------------------------------------------------------------


def test_pages_are_backed_up_as_they_enter_the_tree_a_node_at_a_time_from_the_top() -> None:
    d = driver(owners=2)
    run = d.open(prompt(1, 40))
    d.compute(run, prompt(1, 40))
    assert [(c.first, len(c.pages)) for c in d.given(Backup)] == [(0, 32), (32, 8)]
    assert [page for c in d.given(Backup) for page in c.pages] == run.pages
    d.settle()
    d.close(run)
    assert (d.core.counters.backed_up, d.core.counters.backup_failed) == (40, 0)


def test_a_copy_counts_only_from_its_commit_on() -> None:
    d = driver()
    d.serve(prompt(1, 8))
    assert d.core.flush(["l1", "l2"]).kept == {"l1": 8, "l2": 8}, "both ends are protected"
    d.settle()
    assert d.core.flush(["l1"]).dropped == {"l1": 8}
    assert d.found(prompt(1, 8)) == (0, 8)


def test_a_split_under_a_backup_leaves_both_halves_to_it() -> None:
    d = driver(owners=2)
    d.serve(prompt(1, 10))
    d.serve(branch(1, 4, 12))
    first, second = d.given(Backup)
    assert (first.first, len(first.frames), second.first, len(second.frames)) == (0, 10, 4, 8)
    d.tick((first.op, DONE))
    assert [node.in_l2 for node in d.core.state.tree.nodes.values()] == [True, True, False]  # lower, upper, branch
    assert d.core.flush(["l1"]).dropped == {"l1": 6}, "the branch is being copied and stands on the upper half"
    d.settle()
    d.core.flush(["l1"])
    assert (d.found(prompt(1, 10)), d.found(branch(1, 4, 12))) == ((0, 10), (0, 12))


def test_a_failure_takes_along_what_hangs_on_the_upper_half() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.serve(branch(1, 4, 12))
    above, below = d.given(Backup)
    d.tick((above.op, FAILED))
    assert [lane.private for lane in d.core.l2_lanes()] == [8], "the branch's copies may still be under way"
    assert d.core.flush(["l1"]).dropped == {"l1": 6}, "and still read their pages"
    d.tick((below.op, DONE))
    assert d.free()[1] == 128
    assert (d.core.counters.backed_up, d.core.counters.backup_failed) == (0, 18)


def test_a_failure_in_a_chain_takes_along_what_is_below_and_nothing_above_or_beside() -> None:
    d = driver()
    d.serve(prompt(1, 96))
    d.serve(prompt(2, 8))
    top, middle, bottom, other = d.given(Backup)
    d.tick((top.op, DONE), (middle.op, FAILED), (bottom.op, DONE), (other.op, DONE))
    d.core.flush(["l1"])
    assert (d.found(prompt(1, 96)), d.found(prompt(2, 8))) == ((0, 32), (0, 8))
    assert d.free()[1] == 128 - 40


def test_what_failed_is_tried_again_at_the_next_hit_from_the_top() -> None:
    d = driver()
    d.serve(prompt(1, 40))
    above, below = d.given(Backup)
    d.tick((above.op, FAILED), (below.op, DONE))
    assert d.core.in_flight == 0
    d.close(d.open(prompt(1, 36)))  # a hit of the upper node and of a part of the lower one
    assert [(c.first, len(c.pages)) for c in d.given(Backup)[2:]] == [(0, 32), (32, 4)]
    d.settle()
    d.core.flush(["l1"])
    assert d.found(prompt(1, 40)) == (0, 36)


def test_pages_below_what_has_no_copy_get_none_as_they_enter() -> None:
    d = driver()
    run = d.open(prompt(1, 32))
    d.compute(run, prompt(1, 32))
    d.tick((d.last(Backup).op, FAILED))
    d.compute(run, prompt(1, 40))
    assert len(d.given(Backup)) == 1
    assert d.core.counters.backup_skipped == 8


def test_victims_in_l2_never_come_from_the_copys_own_path() -> None:
    d = driver(l2=40)
    run = d.open(prompt(1, 32))
    d.compute(run, prompt(1, 32))
    d.settle()
    d.compute(run, prompt(1, 64))  # 8 frames are free, and the only victim would be the parent
    assert len(d.given(Backup)) == 1
    assert (d.core.counters.backup_skipped, d.core.counters.evicted_l2) == (32, 0)
    d.close(run)
    d.serve(prompt(2, 32))
    assert (len(d.given(Backup)), d.core.counters.evicted_l2) == (2, 32)


def test_the_path_that_loses_its_copy_stays_in_l1() -> None:
    d = driver(l2=32)
    d.serve(prompt(1, 32))
    d.settle()
    d.serve(prompt(2, 32))
    d.settle()
    assert (d.found(prompt(1, 32)), d.found(prompt(2, 32))) == ((32, 32), (32, 32))
    d.core.flush(["l1"])
    assert (d.found(prompt(1, 32)), d.found(prompt(2, 32))) == ((0, 0), (0, 32))


def test_attaching_twice_is_loud() -> None:
    d = driver()
    d.serve(prompt(1, 8))
    (node,) = d.core.state.tree.nodes.values()
    with pytest.raises(InvariantError, match="has frames already"):
        d.core.copies.back_up(node)


# --- duplicates -------------------------------------------------------------------------------------------------------


def test_a_duplicate_of_what_only_l2_has_becomes_its_copy_in_l1() -> None:
    d = driver(owners=2)
    late = d.open(branch(1, 10, 14), 0)
    in_l2_only(d, prompt(1, 10))
    assert d.compute(late, branch(1, 10, 14)) == []
    pages = list(late.pages)
    assert [(c.first, len(c.pages)) for c in d.given(Backup)] == [(0, 10), (10, 4)], "no second copy"
    assert [node.hits for node in d.core.state.tree.nodes.values()] == [0, 0], "who computed it has not hit it"
    d.close(late)
    run = d.open(prompt(1, 10))
    assert (run.pages, run.load_backs) == (pages[:10], [])


def test_a_duplicate_of_a_part_of_it_splits_it_first() -> None:
    d = driver()
    late = d.open(branch(1, 6, 9), 0)
    in_l2_only(d, prompt(1, 10))
    d.compute(late, branch(1, 6, 9))
    assert d.found(prompt(1, 10)) == (6, 10)
    d.settle()
    assert d.core.flush(["l1"]).kept == {"l1": 9}


def test_a_duplicate_of_what_is_being_loaded_back_is_freed() -> None:
    d = driver()
    late = d.open(prompt(1, 10), 0)
    in_l2_only(d, prompt(1, 10))
    run = d.open(prompt(1, 10))
    assert d.compute(late, prompt(1, 10)) == list(enumerate(run.pages))
    assert late.load_backs == run.load_backs == [d.last(LoadBack).op]
    assert d.free()[0] == 118


# --- load-back --------------------------------------------------------------------------------------------------------


def test_what_is_in_l2_alone_is_loaded_back_and_both_ends_are_kept() -> None:
    d = driver(owners=2)
    in_l2_only(d, prompt(1, 40))
    run = d.open(prompt(1, 38))
    command = d.last(LoadBack)
    assert (run.num_cached, list(command.pages), run.load_backs) == (38, run.pages, [command.op])
    d.close(run)
    assert d.core.flush().kept == {"l1": 38, "l2": 38}
    d.tick((command.op, DONE))
    assert d.core.flush().dropped == {"l1": 38, "l2": 38}
    assert d.free() == (256, 256)


def test_only_the_part_that_l1_lacks_is_loaded_back() -> None:
    d = driver()
    run = d.open(prompt(1, 32))
    d.compute(run, prompt(1, 32))
    d.serve(prompt(1, 40))
    d.settle()
    d.core.flush(["l1"])
    assert d.open(prompt(1, 40)).pages[:32] == run.pages
    assert (d.last(LoadBack).first, len(d.last(LoadBack).frames)) == (32, 8)


def test_a_split_under_a_load_back_lets_others_wait_for_it_too() -> None:
    d = driver()
    in_l2_only(d, prompt(1, 10))
    first = d.open(prompt(1, 10))
    other = d.open(branch(1, 4, 12))
    assert (other.num_cached, other.pages, other.load_backs) == (4, first.pages[:4], first.load_backs)
    assert len(d.given(LoadBack)) == 1
    d.tick((first.load_backs[0], DONE))
    assert first.load_backs == other.load_backs == []
    assert d.core.counters.loaded_back == 10


def test_without_room_in_l1_a_sequence_does_without() -> None:
    d = driver(l1=40)
    in_l2_only(d, prompt(1, 20))
    busy = d.open(prompt(2, 30))
    d.compute(busy, prompt(2, 30))
    before = d.free()
    assert d.open(prompt(1, 20)).num_cached == 0
    assert (d.given(LoadBack), d.free()) == ([], before)


def test_a_failed_load_back_is_loud() -> None:
    d = driver()
    in_l2_only(d, prompt(1, 4))
    d.open(prompt(1, 4))
    with pytest.raises(InvariantError, match="a forward may stand on it"):
        d.tick((d.last(LoadBack).op, FAILED))


# --- policies ---------------------------------------------------------------------------------------------------------


def test_selective_backs_up_at_the_kth_hit() -> None:
    d = driver(WRITE_THROUGH_SELECTIVE, hits=2)
    d.serve(prompt(1, 40))
    d.close(d.open(prompt(1, 40)))
    assert not d.given(Backup)
    d.close(d.open(prompt(1, 40)))
    assert [(c.first, len(c.pages)) for c in d.given(Backup)] == [(0, 32), (32, 8)]


def test_selective_copies_ancestors_first_and_no_further_than_the_hits_go() -> None:
    d = driver(WRITE_THROUGH_SELECTIVE, hits=2)
    d.serve(prompt(1, 40))
    d.close(d.open(prompt(1, 32)))
    d.close(d.open(prompt(1, 40)))
    assert [(c.first, len(c.pages)) for c in d.given(Backup)] == [(0, 32)]
    d.settle()
    d.close(d.open(prompt(1, 40)))
    assert [(c.first, len(c.pages)) for c in d.given(Backup)] == [(0, 32), (32, 8)]


def test_write_back_copies_what_background_eviction_takes_and_frees_it_when_settled() -> None:
    d = driver(WRITE_BACK, l1=64, low=16)
    d.serve(prompt(1, 32))
    d.tick()
    assert not d.given(Backup)
    d.serve(prompt(2, 24))
    d.tick()
    assert [len(c.pages) for c in d.given(Backup)] == [32], "the least recent"
    assert d.free()[0] == 8
    d.tick()
    assert len(d.given(Backup)) == 1, "what leaves counts as free"
    d.settle(Stream.BACKUP)
    assert d.free()[0] == 40
    assert (d.found(prompt(1, 32)), d.core.counters.evicted_l1) == ((0, 32), 32)


def test_write_back_keeps_what_is_hit_while_it_leaves() -> None:
    d = driver(WRITE_BACK, l1=64, low=16)
    d.serve(prompt(1, 32))
    d.serve(prompt(2, 24))
    d.tick()
    run = d.open(prompt(1, 32))
    d.close(run)
    d.tick((d.last(Backup).op, DONE))
    assert d.found(prompt(1, 32)) == (32, 32)
    d.core.flush(["l1"])
    assert d.found(prompt(1, 32)) == (0, 32)


def test_write_back_chooses_anew_when_a_copy_failed() -> None:
    d = driver(WRITE_BACK, l1=64, low=16)
    d.serve(prompt(1, 32))
    d.serve(prompt(2, 24))
    d.tick()
    d.tick((d.last(Backup).op, FAILED))
    assert len(d.given(Backup)) == 2, "the same tick's end chooses again"
    assert d.found(prompt(1, 32)) == (32, 32)
    d.settle()
    assert d.free()[0] == 40


def test_write_back_lets_a_chain_go_from_its_end() -> None:
    d = driver(WRITE_BACK, l1=64, low=40)
    d.serve(prompt(1, 40))
    d.tick()
    assert [(c.first, len(c.pages)) for c in d.given(Backup)] == [(0, 32), (32, 8)], "ancestors are copied first"
    d.tick((d.given(Backup)[0].op, DONE))
    assert d.found(prompt(1, 40)) == (40, 40), "what is below it has not left yet"
    d.settle()
    assert d.found(prompt(1, 40)) == (0, 40)
    assert d.free()[0] == 64


def test_write_back_takes_victims_without_a_copy_when_room_is_needed_now() -> None:
    d = driver(WRITE_BACK, l1=64)
    d.serve(prompt(1, 40))
    d.serve(prompt(2, 40))
    assert not d.given(Backup)
    assert d.found(prompt(1, 40))[1] < 40


def test_write_back_without_room_in_l2_drops() -> None:
    d = driver(WRITE_BACK, l1=64, l2=16, low=16)
    d.serve(prompt(1, 32))
    d.serve(prompt(2, 24))
    d.tick()
    assert not d.given(Backup)
    assert d.found(prompt(1, 32)) == (0, 0)
    assert d.free()[0] == 40
