"""Simulated links: order, times, and what is cut."""

import pytest

from benthic.simulation.channel import Channel


def test_transfers_go_one_after_another() -> None:
    link = Channel(10, latency_us=5)
    link.submit(1, 2, 100)
    link.submit(2, 1, 100)
    assert link.next_end_us() == 125
    assert link.take_done(124) == []
    assert link.take_done(125) == [1]
    assert link.next_end_us() == 140
    assert link.take_done(1000) == [2]
    assert link.next_end_us() is None


def test_an_idle_link_begins_at_once() -> None:
    link = Channel(10)
    link.submit(1, 1, 0)
    assert link.take_done(500) == [1]
    link.submit(2, 1, 500)
    assert link.next_end_us() == 510


def test_reads_go_before_writes_that_have_not_begun() -> None:
    disk = Channel(10)
    disk.submit(1, 1, 0)
    disk.submit(2, 1, 0)
    disk.submit(3, 1, 0, first=True)
    assert disk.take_done(30) == [1, 3, 2]


@pytest.mark.parametrize(("at_us", "moved", "end_us"), [(100, 0, 115), (105, 0, 115), (126, 2, 135), (144, 3, 145)])
def test_a_cut_transfer_ends_with_the_page_under_way(at_us: int, moved: int, end_us: int) -> None:
    disk = Channel(10, latency_us=5)
    disk.submit(1, 4, 100)
    disk.submit(2, 1, 100)
    assert disk.cut(1, at_us) == (moved, True)
    assert disk.next_end_us() == end_us
    assert disk.take_done(end_us) == [1]


def test_a_cut_transfer_that_has_not_begun_is_dropped() -> None:
    disk = Channel(10)
    disk.submit(1, 4, 0)
    disk.submit(2, 4, 0, first=True)
    assert disk.cut(2, 20) == (0, False)
    assert disk.take_done(1000) == [1]
    with pytest.raises(ValueError, match="operation 2 has no transfer"):
        disk.cut(2, 1000)
