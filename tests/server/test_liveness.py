"""When an engine counts as dead."""

from benthic.messages import Beat
from benthic.server.liveness import Bounds, Liveness


def beating(until: int, in_tick_s: float = 0.0) -> Liveness:
    """An engine that beat once a second up to `until`, watched once a second."""
    liveness = Liveness(Bounds())
    for second in range(until + 1):
        liveness.beat(Beat(second, in_tick_s), second)
        assert in_tick_s > 120 or liveness.fault(second, ready=True) is None
    return liveness


def first_fault(liveness: Liveness, begin: int, end: int, *, ready: bool) -> int | None:
    return next((t for t in range(begin, end) if liveness.fault(t, ready=ready)), None)


def test_silence_beyond_the_bound_is_a_fault() -> None:
    assert first_fault(beating(5), 6, 60, ready=True) == 16


def test_loading_may_be_silent_longer() -> None:
    assert first_fault(beating(5), 6, 300, ready=False) == 126


def test_before_the_first_beat_there_is_no_bound() -> None:
    assert first_fault(Liveness(Bounds()), 0, 1000, ready=False) is None


def test_a_tick_without_end_is_a_fault() -> None:
    reason = beating(3, in_tick_s=121).fault(4, ready=True)
    assert reason is not None
    assert "121" in reason
    assert "120" in reason


def test_our_own_pause_is_not_the_engines_fault() -> None:
    liveness = beating(5)
    assert liveness.fault(100, ready=True) is None
    assert first_fault(liveness, 101, 200, ready=True) == 111


def four(until: int, silent: int, since: int) -> Liveness:
    """Four ranks that beat once a second; one is silent from `since` on."""
    liveness = Liveness(Bounds(), 4)
    for second in range(until + 1):
        for rank in range(4):
            if rank != silent or second < since:
                liveness.beat(Beat(300 + second, 0.0, rank), second)
    return liveness


def test_the_silent_rank_is_named_with_its_last_tick() -> None:
    liveness = four(12, silent=2, since=2)
    assert liveness.fault(11, ready=True) is None
    assert liveness.fault(12, ready=True) == (
        "rank 2 has given no sign of life for 11 s (bound 10 s), last in tick 301"
    )


def test_of_several_silent_ranks_the_first_is_named() -> None:
    liveness = four(3, silent=3, since=2)
    assert liveness.fault(4, ready=True) is None
    assert liveness.fault(8.5, ready=True) is None
    assert liveness.fault(13.4, ready=True) == (
        "rank 3 has given no sign of life for 12 s (bound 10 s), last in tick 301"
    )


def test_a_rank_that_has_ended_is_not_missed() -> None:
    liveness = four(20, silent=1, since=5)
    liveness.ended(1)
    assert liveness.fault(20, ready=True) is None
    assert liveness.last_tick(1) == ", last in tick 304"


def test_of_ranks_in_one_tick_the_one_furthest_behind_is_named() -> None:
    liveness = Liveness(Bounds(), 3)
    for rank, tick in enumerate((8, 8, 7)):
        liveness.beat(Beat(tick, 121.0, rank), 1)
    assert liveness.fault(1, ready=True) == "rank 2 has been in one tick for 121 s (bound 120 s), last in tick 7"
