"""Which of several faults is named."""

import math

from hypothesis import given
from hypothesis import strategies as st

from benthic.messages import Failed
from benthic.server.verdict import LAST_WORDS_S, Verdict


def lost(rank: int) -> Failed:
    return Failed(f"rank {rank} has lost the others", rank=rank, follows=True)


def test_a_failure_with_a_cause_of_its_own_is_told_at_once_with_the_ranks_name() -> None:
    verdict = Verdict(4, 12)
    verdict.failed(Failed("no memory", rank=3), 5)
    assert verdict.told(5) == "rank 3: no memory"
    alone = Verdict(1, 12)
    alone.failed(Failed("no memory"), 5)
    assert alone.told(5) == "no memory"


def test_a_name_that_is_there_is_not_said_twice() -> None:
    verdict = Verdict(2, 12)
    verdict.failed(Failed("rank 1 differs from rank 0", rank=1), 0)
    assert verdict.told(0) == "rank 1 differs from rank 0"


def test_a_follower_waits_for_the_first_cause() -> None:
    verdict = Verdict(2, 12)
    verdict.failed(lost(0), 10)
    assert verdict.told(21) is None
    assert verdict.next_look() == 22
    verdict.exited(0, 1, "", 11)  # what it said it would do
    assert verdict.told(21) is None
    verdict.exited(1, -9, ", last in tick 7", 21)
    assert verdict.told(21 + LAST_WORDS_S) == "rank 1's process ended unexpectedly (killed by SIGKILL), last in tick 7"


def test_without_a_first_cause_the_follower_is_told_in_the_end() -> None:
    verdict = Verdict(3, 12)
    verdict.failed(lost(2), 10)
    verdict.failed(lost(1), 10.1)
    assert verdict.told(22) == "rank 2 has lost the others"


def test_where_all_follow_there_is_nothing_to_wait_for() -> None:
    verdict = Verdict(2, 12)
    verdict.failed(lost(1), 10)
    verdict.failed(lost(0), 10.2)
    assert verdict.told(10 + LAST_WORDS_S) == "rank 1 has lost the others"


def test_a_processs_last_words_may_come_after_its_end() -> None:
    verdict = Verdict(2, 12)
    verdict.exited(1, 1, "", 10)
    assert verdict.told(10.1) is None
    verdict.failed(Failed("no memory", rank=1), 10.2)
    assert verdict.told(10.2) == "rank 1: no memory"


def test_one_rank_keeps_its_name() -> None:
    verdict = Verdict(1, 12)
    verdict.exited(0, -9, "", 0)
    assert verdict.told(1) == "the engine process ended unexpectedly (killed by SIGKILL)"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["killed", "ended", "failed", "lost"]), st.integers(0, 3), st.floats(0, 30)), max_size=8
)


@given(EVENTS)
def test_any_fault_is_told_in_the_end_and_no_follower_before_its_time(
    events: list[tuple[str, int, float]],
) -> None:
    verdict = Verdict(4, 12)
    for kind, rank, at in sorted(events, key=lambda event: event[2]):
        if kind in ("killed", "ended"):
            verdict.exited(rank, -9 if kind == "killed" else 1, "", at)
        else:
            verdict.failed(lost(rank) if kind == "lost" else Failed("own", rank=rank), at)
    told = verdict.told(math.inf)
    assert (told is None) == (not events)
    if any(kind == "failed" for kind, _, _ in events):
        assert told is not None
        assert told.endswith(": own")
    elif (look := verdict.next_look()) is not None:
        assert verdict.told(look) is not None
        assert verdict.told(look - 0.01) is None
