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
