"""The engine process: `python -m benthic.engine.process`, started by the server process and by nobody else.

stdin's first line is an `EngineStart`; the pipe then stays open, and its end means that the server is gone: the
engine ends at once, so no orphan is left whatever killed the server. SIGINT and SIGTERM are ignored here, since a
terminal sends them to the whole group: the server turns them into a Shutdown message.
"""

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from benthic.common.errors import BenthicError
from benthic.messages import (
    Beat,
    Failed,
    FromEngine,
    Progress,
    Stopped,
    ToEngine,
    decode_to_engine,
    encode,
)
from benthic.messages.start import EngineStart, decode_start
from benthic.observability.logs import setup_logging
from benthic.weights.locate import Source

if TYPE_CHECKING:
    from benthic.engine.core import EngineCore
    from benthic.tiers.disk.io import DiskIO

logger = logging.getLogger("benthic.engine")

IDLE_WAIT_MS = 1000
STATS_EVERY_S = 1.0
TRIM_S, TRIM_IDLE_S = 60.0, 10.0
SWITCH_S = 0.0001  # a thread that queues copies must not keep the runner from launching for 5 ms, Python's default
_M_ARENA_MAX = -8  # malloc.h


@dataclass(slots=True)
class Pulse:
    """Where the loop is, written by the loop and read by the beat thread (plain stores, no lock needed)."""

    tick: int = 0
    tick_started: float = 0.0  # 0: between ticks
    stop: threading.Event = field(default_factory=threading.Event)


class Link:
    """The two sockets to the server process. One thread only (zmq sockets are not thread-safe)."""

    def __init__(self, context: zmq.Context, order: EngineStart) -> None:  # type: ignore[type-arg]  # generic only in stubs
        self._inbox = context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.connect(order.recv_addr)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(order.send_addr)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))

    def receive(self, wait_ms: int) -> list[ToEngine]:
        """All messages that are there; waits up to `wait_ms` for the first."""
        messages: list[ToEngine] = []
        if wait_ms and not self._inbox.poll(wait_ms):
            return messages
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(decode_to_engine(self._inbox.recv(zmq.NOBLOCK)))
        return messages

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close(linger=2000)


def main(disk_io: "DiskIO | None" = None) -> int:
    """Run the engine until Shutdown. Returns the exit code: 0 after Shutdown, 1 after a failure that was reported.

    `disk_io` stands in for the system's (faults in tests).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _keep_one_arena()
    sys.setswitchinterval(SWITCH_S)
    order = decode_start(sys.stdin.buffer.readline())
    setup_logging(order.config.log_level)
    threading.Thread(target=_end_with_the_server, args=(order,), name="server-watch", daemon=True).start()
    context = zmq.Context()
    pulse = Pulse()
    beat = threading.Thread(target=_beat, args=(context, order.send_addr, pulse), name="beat", daemon=True)
    beat.start()
    link = Link(context, order)
    try:
        _serve(order, link, pulse, disk_io)
        return 0
    except BenthicError as error:
        link.send(Failed(str(error)))
    except Exception as error:  # the process ends; the server must learn why
        logger.exception("the engine failed in tick %d", pulse.tick)
        link.send(Failed(f"the engine failed in tick {pulse.tick}: {type(error).__name__}: {error}"))
    finally:
        pulse.stop.set()
        beat.join(timeout=2)
        link.close()
        context.term()
    return 1


def _serve(order: EngineStart, link: Link, pulse: Pulse, disk_io: "DiskIO | None") -> None:
    """Load, say Ready, then turn the loop until Shutdown."""
    from benthic.engine.build import build_engine  # loads torch: the beat must already run

    def progress(what: str, done: int, total: int) -> None:
        link.send(Progress(what, done, total))

    source = Source(order.source.kind, order.source.path, order.source.written)
    engine, ready = build_engine(order.config, source, progress, disk_io)
    link.send(ready)
    last_stats = 0.0
    heap = Heap()
    while not engine.shutting_down:
        pulse.tick_started = 0.0
        messages = link.receive(IDLE_WAIT_MS if engine.idle else int(engine.pause_s * 1000))
        if messages or not engine.idle:
            _turn(engine, messages, link, pulse)
        if (now := time.monotonic()) - last_stats >= STATS_EVERY_S or engine.idle:
            last_stats = now
            link.send(engine.stats())
            heap.tidy(idle=engine.idle)
    _stop(engine, link, pulse)


def _turn(engine: "EngineCore", messages: list[ToEngine], link: Link, pulse: Pulse) -> None:
    pulse.tick, pulse.tick_started = engine.tick_count, time.monotonic()
    for reply in engine.tick(messages):
        link.send(reply)
    if engine.last_host_s > 0.1:
        logger.warning("slow tick %d: %.0f ms of host time", engine.tick_count, engine.last_host_s * 1e3)


def _stop(engine: "EngineCore", link: Link, pulse: Pulse) -> None:
    """End what runs, let pending spills become durable while the time lasts, and say how it went."""
    engine.cut_off()
    last_stats = 0.0
    while engine.unfinished and time.monotonic() < engine.finish_by:
        _turn(engine, link.receive(int(engine.pause_s * 1000)), link, pulse)
        if (now := time.monotonic()) - last_stats >= STATS_EVERY_S:
            last_stats = now
            link.send(engine.stats())
    pulse.tick_started = 0.0
    unwritten = engine.pages_pending
    engine.close(max(0.0, engine.finish_by - time.monotonic()))
    link.send(Stopped(unwritten))


def _beat(context: "zmq.Context[zmq.Socket[bytes]]", addr: str, pulse: Pulse) -> None:
    """Once a second: this process lives, and how long the loop has been in its tick."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(addr)
    while not pulse.stop.wait(1.0):
        started = pulse.tick_started
        socket.send(encode(Beat(pulse.tick, time.monotonic() - started if started else 0.0)))
    socket.close(linger=0)


def _keep_one_arena() -> None:
    """One heap for all threads, where the C library is glibc.

    The runner thread's activations have ever new sizes; in a heap of its own they leave more holes, and the process
    grows for longer (docs/performance.md). Two threads that allocate do not get in each other's way. Before any thread.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


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


def _end_with_the_server(order: EngineStart) -> None:
    """Wait for the pipe's end; then nobody else is left to remove the private folder of the sockets."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held by a daemon thread, would spoil the interpreter's end
        continue
    folder = Path(order.recv_addr.removeprefix("ipc://")).parent
    if folder.name.startswith("benthic-"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
