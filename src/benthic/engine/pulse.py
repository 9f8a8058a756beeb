"""That a rank lives, told once a second by a thread of its own, whatever its loop does. No torch here."""

import threading
import time
from dataclasses import dataclass, field

import zmq

from benthic.messages import Beat, encode

BEAT_S = 1.0


@dataclass(slots=True)
class Pulse:
    """Where the loop is, written by the loop and read by the beat thread (plain stores, no lock needed)."""

    rank: int = 0
    tick: int = 0
    tick_started: float = 0.0  # 0: between ticks
    stop: threading.Event = field(default_factory=threading.Event)


def run_beat(context: "zmq.Context[zmq.Socket[bytes]]", addr: str, pulse: Pulse) -> None:
    """Once a second: this process lives, and how long the loop has been in its tick. Until `pulse.stop`."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(addr)
    while not pulse.stop.wait(BEAT_S):
        started = pulse.tick_started
        socket.send(encode(Beat(pulse.tick, time.monotonic() - started if started else 0.0, pulse.rank)))
    socket.close(linger=0)
