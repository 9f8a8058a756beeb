"""Whose turn it is to read, and what a reload is answered with: without threads or files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.kvcache.commands import DONE
from benthic.tiers.disk.format import FrameGeometry
from benthic.tiers.disk.io import SystemDisk
from benthic.tiers.disk.jobs import PageRead, Place, own_positions
from benthic.tiers.disk.outbox import Outbox
from benthic.tiers.disk.read_queue import ReadQueue
from benthic.tiers.disk.slab import Slab, SlabFile, reserve_file


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path: Path = tmp_path_factory.mktemp("slab") / "slab-0.dat"
    geometry = FrameGeometry(4096, 1, (("kv", 4096),))
    reserve_file(path, geometry.slot_bytes, SystemDisk())
    return Place(Slab([SlabFile(path, 1, geometry, SystemDisk())]), 0, 1)


class _Queue:
    def __init__(self, place: Place) -> None:
        self.outbox = Outbox()
        self.queue = ReadQueue(self.outbox)
        self.place = place

    def open(self, op: int, positions: range, length: int) -> None:
        self.outbox.expect(op)
        self.queue.open(op, positions, length)

    def plan(self, op: int, positions: range, missing: int | None = None) -> None:
        stop = positions.stop if missing is None else missing
        self.queue.plan(op, [PageRead(b"", self.place, i, i) for i in positions if i < stop], missing)

    def take(self) -> tuple[int, PageRead]:
        job = self.queue.next()
        assert job is not None
        return job

    def answers(self) -> dict[int, int]:
        return {completion.op: completion.value for completion in self.outbox.take()}


def test_reloads_take_turns_by_page(place: Place) -> None:
    q = _Queue(place)
    for op, length in ((1, 6), (2, 2)):
        q.open(op, range(length), length)
        q.plan(op, range(length))
    assert [q.take()[0] for _ in range(8)] == [1, 2, 1, 2, 1, 1, 1, 1]


def test_a_reload_is_reported_when_its_last_transfer_is_over(place: Place) -> None:
    q = _Queue(place)
    q.open(1, range(2), 2)
    q.plan(1, range(2))
    jobs = [q.take(), q.take()]
    q.queue.failed(*jobs[0])
    assert q.answers() == {}  # the other transfer runs, and the keeper has not spoken
    q.queue.judged(1)
    assert q.answers() == {}
    q.queue.verified(*jobs[1])
    assert q.answers() == {1: 1}


def test_pages_behind_a_failed_one_are_not_read(place: Place) -> None:
    q = _Queue(place)
    q.open(1, range(9), 9)
    q.plan(1, range(9))
    q.queue.verified(*q.take())
    q.queue.failed(*q.take())
    q.queue.judged(1)
    assert q.answers() == {1: 2}
    assert q.queue.num_waiting == 0


def test_a_missing_page_ends_the_reload_before_it(place: Place) -> None:
    q = _Queue(place)
    q.open(1, range(1, 9, 2), 9)
    q.plan(1, range(1, 9, 2), missing=5)
    for _ in range(2):
        q.queue.verified(*q.take())
    assert q.answers() == {1: 6}


def test_a_rank_without_pages_reports_the_length(place: Place) -> None:
    q = _Queue(place)
    q.open(1, range(0), 3)
    q.plan(1, range(0))
    assert q.answers() == {1: 4}


def test_at_the_deadline_what_is_verified_counts_and_nothing_new_begins(place: Place) -> None:
    q = _Queue(place)
    q.open(1, range(5), 5)
    q.plan(1, range(5))
    jobs = [q.take() for _ in range(3)]
    q.queue.verified(*jobs[0])
    assert q.queue.settle_now(1) == 2
    assert q.queue.num_waiting == 0
    q.outbox.expect(9)
    q.queue.drain(1, 9)
    q.queue.verified(*jobs[1])
    assert q.answers() == {}
    q.queue.failed(*jobs[2])
    assert q.answers() == {9: DONE}
    q.queue.judged(1)
    assert q.answers() == {}
    assert q.queue.num_running == 0


def test_a_reload_settled_before_it_was_planned_reads_nothing(place: Place) -> None:
    q = _Queue(place)
    q.open(1, range(5), 5)
    assert q.queue.settle_now(1) == 1
    q.plan(1, range(5))
    assert q.queue.num_waiting == 0
    q.outbox.expect(9)
    q.queue.drain(1, 9)
    assert q.answers() == {9: DONE}


def test_closing_answers_what_waits_and_ends_the_readers(place: Place) -> None:
    q = _Queue(place)
    q.open(1, range(4), 4)
    q.plan(1, range(4))
    job = q.take()
    q.queue.close()
    assert q.queue.next() is None
    q.queue.verified(*job)
    assert q.answers() == {1: 2}


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 5), st.data())
def test_own_positions_follow_the_owner_function(first: int, length: int, lanes: int, data: st.DataObject) -> None:
    lane = data.draw(st.integers(0, lanes - 1))
    naive = [i for i in range(length) if (first + i) % lanes == lane]
    assert list(own_positions(first, length, lane, lanes)) == naive


@given(st.integers(1, 12), st.integers(1, 3), st.data())
def test_the_answer_is_the_first_own_page_that_is_not_verified(length: int, lanes: int, data: st.DataObject) -> None:
    outbox = Outbox()
    queue = ReadQueue(outbox)
    own = own_positions(data.draw(st.integers(0, 5)), length, data.draw(st.integers(0, lanes - 1)), lanes)
    bad = set(data.draw(st.sets(st.integers(0, length - 1))))
    outbox.expect(1)
    queue.open(1, own, length)
    reads = [PageRead(b"", None, i, i) for i in own]  # type: ignore[arg-type]  # nothing is read here
    queue.plan(1, reads, None)
    running = []
    while queue.num_waiting or running:
        if queue.num_waiting and (not running or data.draw(st.booleans())):
            running.append(queue.next())
            continue
        job = running.pop(data.draw(st.integers(0, len(running) - 1)))
        assert job is not None
        if job[1].position in bad:
            queue.failed(*job)
            queue.judged(1)
        else:
            queue.verified(*job)
    assert [c.value for c in outbox.take()] == [1 + next((i for i in own if i in bad), length)]
