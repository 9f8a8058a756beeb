"""The fake engine's ranks, in lockstep over a stream socket: what a collective does, without one.

Rank 0 gives the turn, each of the others answers it; whoever loses another says so and ends, as after a broken
exchange. A stopped rank keeps all others waiting.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from benthic.messages import DiskStats, Failed, RankStats, encode
from benthic.messages.start import EngineStart

TURN, STOP = b"t", b"s"
MEET_S = 20.0


class PeerGone(Exception):
    """An exchange broke off."""


@dataclass
class Pulse:
    """What a beat tells."""

    tick: int = 0


class Leader:
    """Rank 0's end of the exchanges; with one rank it has nobody to ask."""

    def __init__(self, order: EngineStart) -> None:
        self._peers: list[socket.socket] = []
        size = order.config.parallel.world_size
        if size == 1:
            return
        path = meeting_point(order)
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(MEET_S)
            door.bind(path)
            door.listen(size)
            self._peers = [door.accept()[0] for _ in range(size - 1)]
        os.unlink(path)
        for peer in self._peers:
            peer.sendall(order.peer_addr.encode() + b"\n")

    def turn(self, signal: bytes = TURN) -> None:
        """One exchange with all. Raises PeerGone."""
        try:
            for peer in self._peers:
                peer.sendall(signal)
            answers = [peer.recv(1) for peer in self._peers]
        except OSError as error:
            raise PeerGone from error
        if not all(answers):
            raise PeerGone


class Follower:
    """Another rank's end."""

    def __init__(self, order: EngineStart) -> None:
        path, end = meeting_point(order), time.monotonic() + MEET_S
        self._leader = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._leader.connect(path)
                break
            except OSError:
                assert time.monotonic() < end, "rank 0 never came"
                time.sleep(0.02)
        self.peer_addr = self._line()

    def _line(self) -> str:
        got = b""
        while not got.endswith(b"\n"):
            byte = self._leader.recv(1)
            if not byte:
                raise PeerGone
            got += byte
        return got.decode().strip()

    def turn(self) -> bytes:
        """Answer rank 0's next turn; gives what it was. Raises PeerGone."""
        try:
            signal = self._leader.recv(1)
            if signal:
                self._leader.sendall(signal)
        except OSError as error:
            raise PeerGone from error
        if not signal:
            raise PeerGone
        return signal

    def leave(self) -> None:
        """Break off."""
        self._leader.close()


def meeting_point(order: EngineStart) -> str:
    """Where rank 0 listens."""
    if order.rendezvous == "env://":
        return str(Path(os.environ["TMPDIR"]) / "meet")
    return order.rendezvous.removeprefix("file://")


def show_rank(rank: int) -> None:
    """Let the tests find this process by its rank."""
    Path("/proc/self/comm").write_text(f"rank-{rank}")


def follow(follower: Follower, order: EngineStart, push: "zmq.Socket[bytes]", pulse: Pulse, *, disk: bool) -> int:
    """Take part until rank 0 stops all or is lost. Returns the exit code."""
    told = 0.0
    try:
        while follower.turn() != STOP:
            pulse.tick += 1
            if disk and time.monotonic() - told > 0.2:
                told = time.monotonic()
                push.send(encode(RankStats(order.rank, (a_disk(order.rank, slots_used=order.rank),))))
        return 0
    except PeerGone:
        push.send(encode(lost(order.rank)))
        return 1


def lost(rank: int) -> Failed:
    """What a rank says when an exchange broke off."""
    return Failed(f"rank {rank} has lost the others: connection closed", rank=rank, follows=True)


def a_disk(rank: int, **fields: object) -> DiskStats:
    """A rank's disk with these figures; all others are 0."""
    zeros: dict[str, object] = dict.fromkeys(DiskStats.__struct_fields__, 0)
    zeros |= {"rank": rank, "path": f"/kv/slab-{rank}.dat", "direct": True, "slots_total": 2000, "slot_bytes": 8192}
    zeros |= {"read_failures": {}, "out_of_service": "", "last_error": ""}
    return DiskStats(**(zeros | fields))  # type: ignore[arg-type]
