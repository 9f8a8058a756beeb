"""Flushing: L1 and L2 at once, the disk when what is in flight there has settled."""

from benthic.kvcache import CoreConfig, Stream
from benthic.kvcache.commands import DONE, ClearDisk, Lookup, Reload, Spill
from benthic.kvcache.flush import PATIENCE_US, DiskFlushed, Flushed
from tests.support.core_driver import CoreDriver, branch, prompt


def driver() -> CoreDriver:
    return CoreDriver(
        CoreConfig(num_owners=2, l1_pages=64, l1_free_pages=0, l2_frames=64, disk=True, staging_frames=64)
    )


def on_disk(d: CoreDriver, hashes: list[bytes]) -> None:
    d.serve(hashes)
    d.settle()
    assert d.core.counters.durable > 0


def test_copies_that_nothing_needs_are_dropped_by_tier() -> None:
    d = driver()
    on_disk(d, prompt(1, 40))
    on_disk(d, branch(1, 10, 20))
    run = d.open(prompt(1, 12))
    assert d.core.flush(["l2"]) == Flushed({"l2": 50}, {"l2": 0})
    assert d.found(prompt(1, 40)) == (40, 40)
    assert d.core.flush(["l1"]) == Flushed({"l1": 38}, {"l1": 12})
    d.close(run)
    assert d.core.flush() == Flushed({"l1": 12, "l2": 0}, {"l1": 0, "l2": 0})
    assert d.core.num_nodes == 0


def test_what_is_in_flight_counts_as_kept() -> None:
    d = driver()
    d.serve(prompt(1, 40))
    assert d.core.flush() == Flushed({"l1": 0, "l2": 0}, {"l1": 40, "l2": 40})
    d.settle(Stream.BACKUP)
    assert d.core.flush() == Flushed({"l1": 40, "l2": 0}, {"l1": 0, "l2": 40}), "gathers"


def test_the_disk_is_emptied_when_nothing_else_is_in_flight_there() -> None:
    d = driver()
    on_disk(d, prompt(1, 10))
    d.serve(prompt(2, 10))
    d.settle(Stream.BACKUP)
    spill = d.last(Spill)
    held = d.core.hold(99, prompt(3, 10), 10)
    assert held is not None
    d.tick()
    d.core.flush_disk(7)
    d.tick((spill.gather, DONE))
    d.tick((spill.durable, DONE))
    assert d.given(ClearDisk) == [], "a look-up is under way"
    d.tick((d.last(Lookup).op, 1 + 10))
    assert (held.done, d.given(Reload)) == (True, []), "no new disk operation"
    d.core.release(held)
    clear = d.last(ClearDisk)
    assert d.core.flushes.take_done() == []
    assert any(node.durable for node in d.core.state.tree.nodes.values())
    d.tick((clear.op, DONE))
    assert d.core.flushes.take_done() == [DiskFlushed(7, False)]
    assert not any(node.durable for node in d.core.state.tree.nodes.values())
    assert (d.core.in_flight, d.core.busy, len(d.given(ClearDisk))) == (0, False, 1)


def test_meanwhile_nothing_is_spilled_or_held_and_afterwards_it_is() -> None:
    d = driver()
    on_disk(d, prompt(1, 10))
    d.core.flush_disk(1)
    d.serve(prompt(2, 10))
    d.settle(Stream.BACKUP)
    assert len(d.given(Spill)) == 1
    assert d.core.hold(99, prompt(3, 10), 10) is None
    assert d.core.busy
    d.tick((d.last(ClearDisk).op, DONE))
    assert len(d.given(Spill)) == 2
    assert d.core.hold(99, prompt(3, 10), 10) is not None
    d.close(d.open(prompt(1, 10)))
    d.tick()
    assert len(d.given(Spill)) == 3, "what was on disk is spilled again at its next hit"


def test_a_second_flush_joins_the_first() -> None:
    d = driver()
    d.core.flush_disk(1)
    assert d.core.busy, "ticks go on for it"
    d.tick()
    d.core.flush_disk(2)
    d.tick()
    (clear,) = d.given(ClearDisk)
    d.tick((clear.op, DONE))
    assert d.core.flushes.take_done() == [DiskFlushed(1, False), DiskFlushed(2, False)]
    assert d.core.flushes.take_done() == []


def test_who_has_waited_long_enough_is_answered_and_the_flush_goes_on() -> None:
    d = driver()
    d.serve(prompt(1, 10))
    d.settle(Stream.BACKUP)
    spill = d.last(Spill)
    d.tick((spill.gather, DONE))
    d.core.flush_disk(1)
    d.tick(us=PATIENCE_US)
    assert d.core.flushes.take_done() == []
    d.core.flush_disk(2)
    d.tick(us=1)
    assert d.core.flushes.take_done() == [DiskFlushed(1, True)]
    d.tick((spill.durable, DONE))
    d.tick((d.last(ClearDisk).op, DONE))
    assert d.core.flushes.take_done() == [DiskFlushed(2, False)]
