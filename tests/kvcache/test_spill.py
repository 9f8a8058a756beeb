"""What goes to the disk, in which order and when not; ages; suspension."""

from benthic.kvcache import CoreConfig, OpId, Stream
from benthic.kvcache.commands import DONE, FAILED, Backup, Spill, Touch
from benthic.kvcache.spill import FAILURES_TO_SUSPEND, FIRST_PAUSE_US, LONGEST_PAUSE_US
from benthic.kvcache.state import WRITE_THROUGH, WRITE_THROUGH_SELECTIVE
from tests.support.core_driver import CoreDriver, branch, prompt


def driver(
    policy: str = WRITE_THROUGH,
    *,
    owners: int = 1,
    l2: int = 512,
    staging: int = 512,
    inflight: int = 64,
    hits: int = 0,
) -> CoreDriver:
    config = CoreConfig(
        num_owners=owners,
        l1_pages=512,
        l1_free_pages=0,
        l2_frames=l2,
        policy=policy,
        selective_hits=1,
        disk=True,
        staging_frames=staging,
        spill_max_inflight=inflight,
        spill_min_hits=hits,
    )
    return CoreDriver(config)


def pages_of(spill: Spill) -> list[bytes]:
    return list(spill.hashes)


def spilled(d: CoreDriver) -> list[list[bytes]]:
    return [pages_of(spill) for spill in d.given(Spill)]


def gather_and_write(d: CoreDriver, value: int = DONE) -> list[OpId]:
    """Every gather in flight ends well, and every write with this value; gives the gathers."""
    d.take()
    gathers, writes = d.core.windows()[Stream.GATHER], d.core.windows()[Stream.DURABLE]
    d.tick(*[(op, DONE) for op in gathers], *[(op, value) for op in writes])
    return list(gathers)


# --- what, and in which order -----------------------------------------------------------------------------------------


def test_what_is_committed_to_l2_is_spilled_in_that_order() -> None:
    d = driver(owners=2)
    d.serve(prompt(2, 10))
    d.serve(prompt(1, 40))
    assert d.given(Spill) == [], "nothing before it is complete"
    first, *others = d.given(Backup)
    d.tick((first.op, DONE))
    assert spilled(d) == [prompt(2, 10)]
    d.tick(*[(c.op, DONE) for c in others])
    assert spilled(d) == [prompt(2, 10), prompt(1, 40)[:32], prompt(1, 40)[32:]]
    spill = d.given(Spill)[1]
    node = d.core.state.tree.find(prompt(1, 1)[0])
    assert node is not None
    assert node.l2 is not None
    assert (spill.first, spill.frames, spill.age) == (0, node.l2.pages, 2)


def test_what_is_on_disk_or_on_its_way_is_not_spilled_again() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.settle(Stream.BACKUP)
    d.close(d.open(prompt(1, 10)))
    d.tick()
    gather_and_write(d)
    d.close(d.open(prompt(1, 10)))
    d.tick()
    assert len(d.given(Spill)) == 1
    assert (d.core.counters.durable, d.core.in_flight) == (10, 0)


def test_both_halves_of_a_split_are_spilled_the_upper_first() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.core.begin_tick(1, 1, [])
    d.ticks = 1
    backup = d.last(Backup)
    d.core.spills.stopped = True  # it is listed, and its turn has not come
    d.tick((backup.op, DONE))
    d.core.spills.stopped = False
    d.serve(branch(1, 4, 6))
    d.tick()
    assert spilled(d) == [prompt(1, 10)[:4], prompt(1, 10)[4:]]
    d.settle()
    assert spilled(d)[2:] == [branch(1, 4, 6)[4:]]


def test_a_split_under_a_spill_marks_both_halves() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.settle(Stream.BACKUP)
    d.serve(branch(1, 4, 6))
    gather_and_write(d)
    assert [node.durable for node in d.core.state.tree.nodes.values()] == [True, True, False]
    d.settle()
    assert spilled(d) == [prompt(1, 10), branch(1, 4, 6)[4:]]


def test_a_tail_is_spilled_only_behind_its_head() -> None:
    d = driver()
    d.serve(prompt(1, 40))
    above, below = d.given(Backup)
    d.tick((above.op, DONE), (below.op, DONE))
    head, tail = d.given(Spill)
    d.tick((head.gather, DONE), (tail.gather, DONE), (head.durable, FAILED))
    d.tick((tail.durable, DONE))
    assert [node.durable for node in d.core.state.tree.nodes.values()] == [False, False], "no use without its head"
    d.close(d.open(prompt(1, 40)))
    d.tick()
    assert spilled(d)[2:] == [prompt(1, 40)[:32], prompt(1, 40)[32:]]
    d.settle()
    assert [node.durable for node in d.core.state.tree.nodes.values()] == [True, True]


def test_a_head_that_is_neither_marked_nor_listed_is_listed_first() -> None:
    d = driver(WRITE_THROUGH_SELECTIVE)
    d.serve(prompt(1, 10))
    d.close(d.open(prompt(1, 10)))
    d.settle(Stream.BACKUP)
    d.tick((d.last(Spill).gather, DONE), (d.last(Spill).durable, FAILED))
    d.serve(prompt(1, 14))
    for node in d.core.state.tree.nodes.values():
        d.core.spills.forget(node)
    d.close(d.open(prompt(1, 14)))
    d.settle(Stream.BACKUP)
    assert spilled(d)[1:] == [prompt(1, 14)[:10], prompt(1, 14)[10:]]


def test_after_k_hits_only() -> None:
    d = driver(hits=2)
    d.serve(prompt(1, 10))
    d.settle()
    d.close(d.open(prompt(1, 10)))
    d.tick()
    assert d.given(Spill) == []
    d.close(d.open(prompt(1, 10)))
    d.tick()
    assert spilled(d) == [prompt(1, 10)]


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_gathers_wait_for_free_staging_buffers() -> None:
    d = driver(staging=36)
    d.serve(prompt(1, 72))
    d.settle(Stream.BACKUP)
    assert [len(s.frames) for s in d.given(Spill)] == [32]
    d.tick((d.last(Spill).gather, DONE))
    assert len(d.given(Spill)) == 1, "the buffers are free only when the write is over"
    d.tick((d.last(Spill).durable, DONE))
    assert [len(s.frames) for s in d.given(Spill)] == [32, 32]
    gather_and_write(d)
    assert [len(s.frames) for s in d.given(Spill)] == [32, 32, 8]


def test_the_bound_of_operations_holds() -> None:
    d = driver(inflight=2)
    for name in range(4):
        d.serve(prompt(name, 4))
    d.settle(Stream.BACKUP)
    assert len(d.given(Spill)) == 2
    assert d.core.busy
    gather_and_write(d)
    gather_and_write(d)
    assert len(d.given(Spill)) == 4
    assert not d.core.busy


def test_a_gather_protects_its_frames_and_the_write_does_not() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.settle(Stream.BACKUP)
    spill = d.last(Spill)
    assert d.core.flush().kept == {"l1": 0, "l2": 10}
    assert not d.core.patient
    d.tick((spill.gather, DONE))
    assert d.core.patient, "a write alone is in no hurry"
    assert d.core.flush().dropped == {"l1": 0, "l2": 10}
    d.tick((spill.durable, DONE))
    assert (d.core.num_nodes, d.core.counters.durable) == (0, 10)


def test_what_l2_drops_before_its_turn_is_lost_and_counted() -> None:
    d = driver(inflight=1, l2=72)
    d.serve(prompt(1, 32))
    d.serve(prompt(2, 32))
    d.settle(Stream.BACKUP)
    d.core.flush(["l1"])
    assert spilled(d) == [prompt(1, 32)]
    d.serve(prompt(3, 32))
    assert d.core.counters.spill_nodes_lost == 1, "the first is being gathered; the second gives way"
    d.settle()
    assert spilled(d) == [prompt(1, 32), prompt(3, 32)]


def test_a_failed_spill_is_tried_again_at_the_next_hit() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.settle(Stream.BACKUP)
    gather_and_write(d, FAILED)
    d.tick()
    assert (len(d.given(Spill)), d.core.busy) == (1, False)
    d.close(d.open(prompt(1, 10)))
    d.tick()
    assert spilled(d) == [prompt(1, 10)] * 2
    assert d.core.counters.durable_failed_ops == 1


def test_an_answer_for_a_node_that_has_come_back_marks_nothing() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.settle(Stream.BACKUP)
    spill = d.last(Spill)
    d.tick((spill.gather, DONE))
    d.core.flush()
    d.serve(prompt(1, 10))
    d.tick((spill.durable, DONE))
    assert [node.durable for node in d.core.state.tree.nodes.values()] == [False]


# --- suspension -------------------------------------------------------------------------------------------------------


def failing(d: CoreDriver, count: int) -> None:
    """So many prompts, each of whose spills fails."""
    for _ in range(count):
        d.serve(prompt(d.next_id, 4))
        d.settle(Stream.BACKUP)
        gather_and_write(d, FAILED)


def test_after_eight_failures_in_a_row_spilling_pauses_then_tries_one() -> None:
    d = driver()
    failing(d, FAILURES_TO_SUSPEND - 1)
    assert not d.core.spills.suspended
    d.serve(prompt(100, 4))
    d.settle(Stream.BACKUP)
    gather_and_write(d)  # one that ends well: the count starts anew
    failing(d, FAILURES_TO_SUSPEND)
    assert d.core.spills.suspended
    tried = len(d.given(Spill))
    d.serve(prompt(101, 4))
    d.serve(prompt(102, 4))
    d.settle(Stream.BACKUP)
    assert (len(d.given(Spill)), d.core.busy) == (tried, False), "what is listed keeps no ticks going"
    d.tick(us=FIRST_PAUSE_US - 10_000)
    assert len(d.given(Spill)) == tried
    d.tick(us=20_000)
    assert len(d.given(Spill)) == tried + 1, "one try"
    gather_and_write(d)
    assert not d.core.spills.suspended
    assert len(d.given(Spill)) == tried + 2


def test_each_try_that_fails_doubles_the_pause_up_to_an_hour() -> None:
    d = driver()
    failing(d, FAILURES_TO_SUSPEND)
    pauses = []
    for name in range(100, 110):
        d.serve(prompt(name, 4))
        d.settle(Stream.BACKUP)
        pauses.append(d.core.spills.pause_us)
        d.tick(us=pauses[-1] + 1)
        assert len(d.core.windows()[Stream.DURABLE]) == 1
        gather_and_write(d, FAILED)
    assert pauses == [min(FIRST_PAUSE_US << n, LONGEST_PAUSE_US) for n in range(10)]
    assert pauses[-1] == 3_600_000_000


def test_failures_of_what_was_under_way_do_not_lengthen_the_pause() -> None:
    d = driver()
    for name in range(12):
        d.serve(prompt(name, 4))
    d.settle(Stream.BACKUP)
    d.settle(Stream.GATHER)
    for op in d.core.windows()[Stream.DURABLE]:
        d.tick((op, FAILED))
    assert (d.core.spills.failures, d.core.spills.pause_us) == (12, FIRST_PAUSE_US)


# --- ages -------------------------------------------------------------------------------------------------------------


def test_an_admission_touches_all_that_it_uses_and_no_more() -> None:
    d = driver()
    d.serve(prompt(1, 40))
    assert d.given(Touch) == [], "what it brings is as young as itself"
    d.serve(prompt(2, 8))
    d.close(d.open(prompt(1, 36)))
    (touch,) = d.given(Touch)
    assert (touch.first, touch.hashes, touch.age) == (0, tuple(prompt(1, 36)), 3)
    tree = d.core.state.tree
    bottom = tree.find(prompt(1, 40)[-1])
    assert bottom is not None
    assert {node.first: node.age for node in tree.path(bottom, tree.root)} == {0: 3, 32: 3, 36: 1}


def test_a_tail_is_never_younger_than_its_head() -> None:
    d = driver()
    first = d.open(prompt(1, 40), 0)
    d.serve(prompt(1, 20))  # admitted later, and ready earlier
    d.compute(first, prompt(1, 40))
    ages = [node.age for node in d.core.state.tree.nodes.values()]
    assert ages == [2, 1]
    late = d.open(branch(1, 20, 30), 0)
    d.serve(prompt(9, 4))
    d.compute(late, branch(1, 20, 30))  # its head is a duplicate
    assert d.last(Touch).hashes == tuple(prompt(1, 20))
    assert d.last(Touch).age == 3


def test_a_later_admission_that_was_touched_already_is_not_made_older() -> None:
    d = driver()
    old = d.open(branch(1, 10, 12), 0)
    d.serve(prompt(1, 10))
    d.close(d.open(prompt(1, 10)))
    count = len(d.given(Touch))
    d.compute(old, branch(1, 10, 12))
    assert len(d.given(Touch)) == count
    node = d.core.state.tree.find(prompt(1, 10)[0])
    assert node is not None
    assert node.age == 3
