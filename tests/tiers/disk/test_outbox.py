"""Every operation is answered once, whoever answers first."""

import threading

import pytest

from benthic.kvcache.commands import DONE, FAILED, Completion
from benthic.tiers.disk.outbox import Outbox


def test_the_first_answer_counts_and_the_second_is_dropped() -> None:
    outbox = Outbox()
    outbox.expect(1)
    outbox.answer(1, DONE)
    outbox.answer(1, FAILED)
    assert outbox.take() == [Completion(1, DONE)]
    assert outbox.take() == []


def test_what_was_never_submitted_is_not_answered() -> None:
    outbox = Outbox()
    outbox.answer(1, DONE)
    assert outbox.take() == []


def test_a_list_that_was_taken_does_not_grow() -> None:
    outbox = Outbox()
    before = outbox.take()
    outbox.expect(1)
    outbox.answer(1, DONE)
    assert outbox.take() == [Completion(1, DONE)]
    assert before == []


def test_a_revoked_operation_gives_the_answer_that_waits_or_none_and_is_not_reported() -> None:
    outbox = Outbox()
    for op in (1, 2, 3):
        outbox.expect(op)
    outbox.answer(1, 7)
    outbox.answer(2, 8)
    assert outbox.revoke(2) == 8
    assert outbox.revoke(3) is None
    outbox.answer(3, 9)
    assert outbox.take() == [Completion(1, 7)]
    with pytest.raises(KeyError, match="operation 1"):
        outbox.revoke(1)


def test_many_threads_answer_each_operation_once() -> None:
    outbox = Outbox()
    for op in range(2000):
        outbox.expect(op)

    def answer_all(value: int) -> None:
        for op in range(2000):
            outbox.answer(op, value)

    threads = [threading.Thread(target=answer_all, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen += outbox.take()
    for thread in threads:
        thread.join()
    seen += outbox.take()
    assert sorted(completion.op for completion in seen) == list(range(2000))
    assert outbox.num_open == 0
