"""What rank 0 tells the other ranks in each tick: all that a decision may depend on and that it alone has seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from benthic.forward import Int32
from benthic.messages import ToEngine, decode_to_engine, encode
from benthic.parallel.control import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class TickFrame:
    """One tick's inputs, the same on every rank."""

    now_us: int  # the tick clock
    messages: tuple[ToEngine, ...] = ()
    taken: tuple[Int32, ...] = ()  # sampled tokens of each outstanding step, oldest first, whose result is taken now
    read_us_per_page: int = 0
    compute_us_per_page: int = 0
    ends: bool = False  # no tick: every rank closes


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    now_us: int
    messages: list[bytes]
    taken: list[bytes]  # int32
    read_us_per_page: int
    compute_us_per_page: int
    ends: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Wire)


def tell(control: Control, frame: TickFrame) -> None:
    """Rank 0's frame to all others; with one rank nothing happens."""
    if control.size == 1:
        return
    wire = _Wire(
        frame.now_us,
        [encode(message) for message in frame.messages],
        [np.ascontiguousarray(tokens, np.int32).tobytes() for tokens in frame.taken],
        frame.read_us_per_page,
        frame.compute_us_per_page,
        frame.ends,
    )
    control.share(_encoder.encode(wire))


def hear(control: Control) -> TickFrame:
    """The next frame of rank 0, on any other rank. Raises PeerLost."""
    wire = _decoder.decode(control.share(None))
    return TickFrame(
        now_us=wire.now_us,
        messages=tuple(decode_to_engine(message) for message in wire.messages),
        taken=_tokens(wire.taken),
        read_us_per_page=wire.read_us_per_page,
        compute_us_per_page=wire.compute_us_per_page,
        ends=wire.ends,
    )


def _tokens(taken: Sequence[bytes]) -> tuple[Int32, ...]:
    return tuple(np.frombuffer(tokens, np.int32) for tokens in taken)
