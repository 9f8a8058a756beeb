"""Messages survive the trip between processes, and damaged frames are refused."""

import msgspec
import pytest

from benthic.messages import (
    Abort,
    Finished,
    FlushCache,
    Outputs,
    Prefilled,
    SamplingParams,
    Shutdown,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
)


@pytest.mark.parametrize(
    "message",
    [
        Submit(
            id=3,
            prompt=b"\1\0\0\0",
            root=b"r" * 32,
            hashes=b"",
            params=SamplingParams(max_tokens=4, logit_bias={5: -1.0}),
        ),
        Abort((1, 2)),
        FlushCache(9),
        Shutdown(),
    ],
)
def test_to_engine(message) -> None:
    assert decode_to_engine(encode(message)) == message


def test_from_engine() -> None:
    message = Outputs(
        ids=b"x" * 8, tokens=b"y" * 4, prefilled=(Prefilled(1, 64, 0.5),), finished=(Finished(1, "stop"),)
    )
    assert decode_from_engine(encode(message)) == message


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x81\xa4type\xa5Nope!", encode(Abort((1,)))[:-1]])
def test_damaged_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(frame)
