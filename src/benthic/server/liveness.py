"""Whether the engine still lives, judged by its ranks' beats. Pure: the caller brings the clock."""

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
    follow_s: float = 12.0  # from a rank that lost another to the fault of that other: above `beat_s`


@dataclass(slots=True)
class _Pulse:
    """A rank's last beat."""

    at: float
    tick: int
    in_tick_s: float


class Liveness:
    """Owns each rank's last beat."""

    def __init__(self, bounds: Bounds, num_ranks: int = 1) -> None:
        self._bounds = bounds
        self._num_ranks = num_ranks
        self._pulses: dict[int, _Pulse] = {}
        self._ended: set[int] = set()
        self._last_check: float | None = None

    def beat(self, message: Beat, now: float) -> None:
        """A beat has arrived at `now` (seconds)."""
        self._pulses[message.rank] = _Pulse(now, message.tick, message.in_tick_s)

    def ended(self, rank: int) -> None:
        """The rank has said that it can't go on, or its process has ended: its silence is no news."""
        self._ended.add(rank)

    def last_tick(self, rank: int) -> str:
        """`, last in tick 341` where there are several ranks and this one has beaten; else nothing."""
        pulse = self._pulses.get(rank)
        return "" if pulse is None or self._num_ranks == 1 else f", last in tick {pulse.tick}"

    def fault(self, now: float, *, ready: bool) -> str | None:
        """Why the engine counts as dead at `now`, or None. To be called about once a second."""
        paused = self._last_check is not None and now - self._last_check > self._bounds.stall_s
        self._last_check = now
        if paused:
            for pulse in self._pulses.values():
                pulse.at = now
            return None
        watched = [(rank, pulse) for rank, pulse in self._pulses.items() if rank not in self._ended]
        return self._silent(watched, now, ready) or self._stuck(watched)

    def _silent(self, watched: list[tuple[int, _Pulse]], now: float, ready: bool) -> str | None:
        """The rank that has been silent the longest, if beyond the bound."""
        bound = self._bounds.beat_s if ready else self._bounds.loading_beat_s
        late = [(pulse.at, rank) for rank, pulse in watched if now - pulse.at > bound]
        if not late:
            return None
        at, rank = min(late)
        return (
            f"{self._name(rank)} has given no sign of life for {now - at:.0f} s (bound {bound:g} s)"
            f"{self.last_tick(rank)}"
        )

    def _stuck(self, watched: list[tuple[int, _Pulse]]) -> str | None:
        """A rank that does not come out of a tick. The others soon wait for it in theirs: it is the furthest behind."""
        bound = self._bounds.tick_s
        late = [(pulse.tick, rank, pulse.in_tick_s) for rank, pulse in watched if pulse.in_tick_s > bound]
        if not late:
            return None
        _, rank, seconds = min(late)
        return f"{self._name(rank)} has been in one tick for {seconds:.0f} s (bound {bound:g} s){self.last_tick(rank)}"

    def _name(self, rank: int) -> str:
        return "the engine" if self._num_ranks == 1 else f"rank {rank}"
