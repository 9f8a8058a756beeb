"""What the server process writes to a new engine process's standard input: one line of JSON, its start order.

After that line the pipe stays open and carries nothing: its end tells the engine that the server is gone.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from benthic.config import EngineConfig


class ModelSource(msgspec.Struct, frozen=True):
    """Where the weights are on this machine: the fields of `benthic.weights.locate.Source`, which the server process
    found."""

    kind: Literal["gguf", "folder"]
    path: Path
    written: str  # what the user wrote


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine process needs: what to run, and where its two sockets are.

    The server binds both addresses. The engine connects a ZeroMQ PULL socket to `recv_addr` (messages of `ToEngine`)
    and a PUSH socket to `send_addr` (`FromEngine`). It ignores SIGINT and SIGTERM (which arrive blocked): the server
    ends it with `Shutdown`, or by closing the pipe.
    """

    config: EngineConfig
    source: ModelSource
    recv_addr: str  # e.g. ipc:///tmp/benthic-x1/to_engine; "" for every rank but the first
    send_addr: str  # "": the first rank tells it (`peer_addr`) when the ranks have met
    rank: int = 0
    local_rank: int = 0  # among the ranks of this host
    local_size: int = 1
    rendezvous: str = ""  # where several ranks meet: file:///path of a FileStore, or env:// (torchrun's variables)
    peer_addr: str = ""  # of the first rank's order: where ranks without a `send_addr` send to


def encode_start(order: EngineStart) -> bytes:
    """The order as one line of JSON, newline included."""
    return msgspec.json.encode(order, enc_hook=_enc_hook) + b"\n"


def decode_start(line: bytes) -> EngineStart:
    """Parse the line. Raises msgspec.ValidationError."""
    return msgspec.json.decode(line, type=EngineStart, dec_hook=_dec_hook)


def _enc_hook(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _dec_hook(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)
