"""The loops of an engine process: rank 0's follows the server's messages, the others' follow rank 0's frames."""

import ctypes
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from benthic.engine.core import EngineCore
from benthic.engine.frames import hear
from benthic.engine.pulse import Pulse
from benthic.messages import FromEngine, RankStats, Stopped, ToEngine
from benthic.parallel.control import Control

logger = logging.getLogger("benthic.engine")

IDLE_WAIT_MS = 1000
STATS_EVERY_S = 1.0
FRAME_EVERY_S = 20.0  # an idle rank 0 is heard of so often: well within the bound of an exchange
TRIM_S, TRIM_IDLE_S = 60.0, 10.0


class Link(Protocol):
    """The way to the server process."""

    def send(self, message: FromEngine) -> None: ...
    def receive(self, wait_ms: int) -> list[ToEngine]: ...


class Lead:
    """Rank 0, or the only one (`alone`), which nobody waits for while it is idle."""

    def __init__(self, engine: EngineCore, link: Link, pulse: Pulse, *, alone: bool) -> None:
        self._engine = engine
        self._link = link
        self._pulse = pulse
        self._alone = alone
        self._last_stats = 0.0
        self._last_turn = time.monotonic()

    def run(self) -> None:
        """Turn until Shutdown, then end in order."""
        engine, heap = self._engine, Heap()
        while not engine.shutting_down:
            self._pulse.tick_started = 0.0
            messages = self._link.receive(IDLE_WAIT_MS if engine.idle else int(engine.pause_s * 1000))
            if messages or not engine.idle or self._frame_due:
                self._turn(messages)
            if self._send_stats(at_once=engine.idle):
                heap.tidy(idle=engine.idle)
        self._stop()

    @property
    def _frame_due(self) -> bool:
        return not self._alone and time.monotonic() - self._last_turn > FRAME_EVERY_S

    def _turn(self, messages: Sequence[ToEngine]) -> None:
        engine, pulse = self._engine, self._pulse
        pulse.tick, pulse.tick_started = engine.tick_count + 1, time.monotonic()
        self._last_turn = pulse.tick_started
        for reply in engine.tick(messages):
            self._link.send(reply)
        if engine.last_host_s > 0.1:
            logger.warning("slow tick %d: %.0f ms of host time", engine.tick_count, engine.last_host_s * 1e3)

    def _send_stats(self, *, at_once: bool = False) -> bool:
        if (now := time.monotonic()) - self._last_stats < STATS_EVERY_S and not at_once:
            return False
        self._last_stats = now
        self._link.send(self._engine.stats())
        return True

    def _stop(self) -> None:
        """End what runs, let pending spills become durable while the time lasts, and say how it went."""
        engine = self._engine
        engine.cut_off()
        while engine.unfinished and time.monotonic() < engine.finish_by:
            self._turn(self._link.receive(int(engine.pause_s * 1000)))
            self._send_stats()
        self._pulse.tick_started = 0.0
        unwritten = engine.pages_pending
        engine.end()
        engine.close(max(0.0, engine.finish_by - time.monotonic()))
        self._link.send(Stopped(unwritten))


def follow(engine: EngineCore, control: Control, link: Link, pulse: Pulse) -> None:
    """Any other rank: the turns that rank 0 tells of, until it tells of the end. Raises PeerLost."""
    heap = Heap()
    last_stats = 0.0
    while True:
        pulse.tick_started = 0.0
        frame = hear(control)
        if frame.ends:
            break
        pulse.tick, pulse.tick_started = engine.tick_count + 1, time.monotonic()
        engine.follow(frame)
        if (now := time.monotonic()) - last_stats >= STATS_EVERY_S or engine.idle:
            last_stats = now
            link.send(RankStats(pulse.rank, engine.workers.disk_stats()))
            heap.tidy(idle=engine.idle)
    engine.close(max(0.0, engine.finish_by - time.monotonic()))


class Heap:
    """Gives back to the system what malloc holds free, now and then, where the C library is glibc.

    Activations of ever new sizes leave holes between what lives on; a process would grow by them for days.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._last = time.monotonic()

    def tidy(self, *, idle: bool) -> None:
        """Every minute, or every ten seconds where nobody waits for the few milliseconds."""
        now = time.monotonic()
        if self._trim is not None and now - self._last >= (TRIM_IDLE_S if idle else TRIM_S):
            self._last = now
            self._trim(0)
