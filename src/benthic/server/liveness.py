"""Whether the engine still lives, judged by its beats. Pure: the caller brings the clock."""

from dataclasses import dataclass

from benthic.messages import Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long the engine may be silent. A long start is no fault: imports and kernels can hold its threads for a
    while."""

    beat_s: float = 10.0
    loading_beat_s: float = 120.0
    tick_s: float = 120.0  # one tick; a chunk of prefill is well under a second
    stall_s: float = 5.0  # a check this late was our own pause, so older silence proves nothing


class Liveness:
    """Owns the time of the last beat."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._last_beat: float | None = None
        self._in_tick_s = 0.0
        self._last_check: float | None = None

    def beat(self, message: Beat, now: float) -> None:
        """A beat has arrived at `now` (seconds)."""
        self._last_beat = now
        self._in_tick_s = message.in_tick_s

    def fault(self, now: float, *, ready: bool) -> str | None:
        """Why the engine counts as dead at `now`, or None. To be called about once a second."""
        paused = self._last_check is not None and now - self._last_check > self._bounds.stall_s
        self._last_check = now
        if self._last_beat is None:
            return None
        if paused:
            self._last_beat = now
            return None
        bound = self._bounds.beat_s if ready else self._bounds.loading_beat_s
        if now - self._last_beat > bound:
            return f"the engine has given no sign of life for {now - self._last_beat:.0f} s (bound {bound:g} s)"
        if self._in_tick_s > self._bounds.tick_s:
            return f"the engine has been in one tick for {self._in_tick_s:.0f} s (bound {self._bounds.tick_s:g} s)"
        return None
