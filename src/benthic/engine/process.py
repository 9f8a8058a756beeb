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
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from benthic.common.errors import BenthicError, PeerLost
from benthic.engine.pulse import Pulse, run_beat
from benthic.messages import Failed, FromEngine, Progress, ToEngine, decode_to_engine, encode
from benthic.messages.start import EngineStart, decode_start
from benthic.observability.logs import setup_logging
from benthic.weights.locate import Source

if TYPE_CHECKING:
    from benthic.parallel.layout import ParallelLayout
    from benthic.tiers.disk.io import DiskIO

logger = logging.getLogger("benthic.engine")

SWITCH_S = 0.0001  # a thread that queues copies must not keep the runner from launching for 5 ms, Python's default
_M_ARENA_MAX = -8  # malloc.h


class Link:
    """The way to the server process; only rank 0 receives. One thread only (zmq sockets are not thread-safe)."""

    def __init__(self, context: zmq.Context, recv_addr: str, send_addr: str) -> None:  # type: ignore[type-arg]  # generic only in stubs
        self._inbox = None
        if recv_addr:
            self._inbox = context.socket(zmq.PULL)
            self._inbox.set_hwm(0)
            self._inbox.connect(recv_addr)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(send_addr)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))

    def receive(self, wait_ms: int) -> list[ToEngine]:
        """All messages that are there; waits up to `wait_ms` for the first."""
        messages: list[ToEngine] = []
        if self._inbox is None or (wait_ms and not self._inbox.poll(wait_ms)):
            return messages
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(decode_to_engine(self._inbox.recv(zmq.NOBLOCK)))
        return messages

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.close(linger=0)
        self._outbox.close(linger=2000)


def main(disk_io: "DiskIO | None" = None) -> int:
    """Run the engine until Shutdown. Returns the exit code: 0 after Shutdown, 1 after a failure that was reported.

    `disk_io` stands in for the system's (faults in tests).
    """
    _ignore_signals()
    return run_rank(decode_start(sys.stdin.buffer.readline()), lifeline=True, disk_io=disk_io)


def run_rank(order: EngineStart, *, lifeline: bool, disk_io: "DiskIO | None" = None) -> int:
    """One rank of an engine, until its end. `lifeline`: standard input is a pipe whose end means the server's.

    A rank without `send_addr` learns it from rank 0 when they have met. Returns the exit code, as `main`.
    """
    _ignore_signals()
    _keep_one_arena()
    sys.setswitchinterval(SWITCH_S)
    setup_logging(order.config.log_level)
    if lifeline:
        threading.Thread(target=_end_with_the_server, args=(order,), name="server-watch", daemon=True).start()
    context = zmq.Context()
    pulse = Pulse(rank=order.rank)
    report = Report(context, pulse)
    if order.send_addr:
        report.open(order.recv_addr, order.send_addr)
    try:
        _serve(order, report, pulse, disk_io)
        return 0
    except PeerLost as error:
        logger.error("%s, in tick %d: %s", f"rank {order.rank}", pulse.tick, error)
        report.failed(Failed(str(error), order.rank, follows=True))
    except BenthicError as error:
        report.failed(Failed(str(error), order.rank))
    except Exception as error:  # the process ends; the server must learn why
        logger.exception("the engine failed in tick %d", pulse.tick)
        report.failed(Failed(f"the engine failed in tick {pulse.tick}: {type(error).__name__}: {error}", order.rank))
    finally:
        report.close()
        context.term()
    if order.config.parallel.world_size > 1:
        _leave(1)
    return 1


def _leave(code: int) -> None:
    """End at once. The runner's thread may wait in an exchange for ever; Python's own end would break it off there, in
    code that answers with SIGABRT."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


class Report:
    """The link and the beats, from the moment that the server's address is known."""

    def __init__(self, context: zmq.Context, pulse: Pulse) -> None:  # type: ignore[type-arg]  # as above
        self._context = context
        self._pulse = pulse
        self._beat: threading.Thread | None = None
        self.link: Link | None = None

    def open(self, recv_addr: str, send_addr: str) -> Link:
        """Connect, and start to beat."""
        self.link = Link(self._context, recv_addr, send_addr)
        beat = threading.Thread(target=run_beat, args=(self._context, send_addr, self._pulse), name="beat", daemon=True)
        beat.start()
        self._beat = beat
        return self.link

    def failed(self, message: Failed) -> None:
        """Tell the server, or where it is not known yet the terminal, why this rank ends."""
        if self.link is None:
            sys.stderr.write(f"rank {message.rank}: {message.message}\n")
        else:
            self.link.send(message)

    def close(self) -> None:
        """End the beats, then the link."""
        self._pulse.stop.set()
        if self._beat is not None:
            self._beat.join(timeout=2)
        if self.link is not None:
            self.link.close()


def _serve(order: EngineStart, report: Report, pulse: Pulse, disk_io: "DiskIO | None") -> None:
    """Meet the other ranks, load, say Ready, then turn the loop until Shutdown."""
    from benthic.engine.build import build_engine, pick_device  # loads torch: the beat must already run
    from benthic.engine.loops import Lead, follow
    from benthic.parallel.launch import meet, part

    place = layout_of(order)
    ranks = meet(place, order.rendezvous, pick_device(order.config.model.device, place)[0])
    if place.world_size > 1:
        told = ranks.start.share(order.peer_addr.encode() if place.leads else None).decode()
        if report.link is None:
            report.open("", told)
    link = report.link
    assert link is not None

    def progress(what: str, done: int, total: int) -> None:
        if place.leads:
            link.send(Progress(what, done, total))

    source = Source(order.source.kind, order.source.path, order.source.written)
    engine, ready = build_engine(order.config, source, progress, disk_io, ranks)
    ranks.barrier()  # every rank is ready
    if place.leads:
        link.send(ready)
        Lead(engine, link, pulse, alone=place.world_size == 1).run()
    else:
        follow(engine, ranks.control, link, pulse)
    part()


def layout_of(order: EngineStart) -> "ParallelLayout":
    """This rank's place, as its order has it."""
    from benthic.parallel.layout import ParallelLayout

    parallel = order.config.parallel
    return ParallelLayout(
        rank=order.rank,
        cp_size=parallel.cp_size,
        tp_size=parallel.tp_size,
        expert_parallel=parallel.expert_parallel,
        local_rank=order.local_rank,
        local_size=order.local_size,
    )


def _ignore_signals() -> None:
    """A terminal sends them to the whole group; the server turns them into messages."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _keep_one_arena() -> None:
    """One heap for all threads, where the C library is glibc.

    The runner thread's activations have ever new sizes; in a heap of its own they leave more holes, and the process
    grows for longer (docs/performance.md). Two threads that allocate do not get in each other's way. Before any thread.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _end_with_the_server(order: EngineStart) -> None:
    """Wait for the pipe's end; then nobody else is left to remove the private folder of the sockets."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held by a daemon thread, would spoil the interpreter's end
        continue
    folder = Path(order.send_addr.removeprefix("ipc://")).parent
    if folder.name.startswith("benthic-"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
