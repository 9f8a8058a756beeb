"""Recorded traces: one JSON object a line, with `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`.

The format is that of the Mooncake project's traces (github.com/kvcache-ai/Mooncake). A hash id names a block of the
prompt's tokens, the last one perhaps in part; here a block is a page.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from benthic.common.errors import ConfigError
from benthic.common.layout import ceil_div
from benthic.common.show import clip
from benthic.kvcache import HASH_BYTES

Count = Annotated[int, msgspec.Meta(ge=0)]

_EXPECTED = (
    'expected an object such as {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, …]}'
)


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Count
    hash_ids: list[Count]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `hashes` has one entry a page of the prompt; equal entries mean equal prefixes up to there."""

    arrival_us: int  # since the first arrival
    input_tokens: int
    output_tokens: int
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests by arrival, and how many different pages they bring, by position in the prompt."""

    requests: tuple[TraceRequest, ...]
    unique_by_position: tuple[int, ...]

    @property
    def num_pages(self) -> int:
        """Pages of all prompts."""
        return sum(len(request.hashes) for request in self.requests)

    def unique_of_owner(self, owner: int, num_owners: int) -> int:
        """How many different pages one lane would have to hold."""
        return sum(self.unique_by_position[owner::num_owners])


class Chains:
    """Numbers prefixes: a content hash stands for all before it, and a trace's id may stand for its block alone."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}  # (prefix, id of the block behind it) → the longer prefix
        self.unique_by_position: list[int] = []

    def hashes(self, ids: list[int]) -> list[bytes]:
        """One hash a block. The number itself, not a digest of it: the core only asks whether two are equal."""
        numbers, prefix = self._numbers, 0
        hashes = []
        for position, block in enumerate(ids):
            key = (prefix, block)
            known = numbers.get(key)
            if known is None:
                known = numbers[key] = len(numbers) + 1
                if position == len(self.unique_by_position):
                    self.unique_by_position.append(0)
                self.unique_by_position[position] += 1
            prefix = known
            hashes.append(prefix.to_bytes(HASH_BYTES, "big"))
        return hashes


def read_trace(path: Path, page_tokens: int, limit: int | None = None) -> Trace:
    """Read the first `limit` requests of a trace whose hash ids stand for `page_tokens` tokens each.

    Raises ConfigError for a file that can't be read or has no request, and for a bad line, with its number.
    """
    chains = Chains()
    lines = list(_lines(path, page_tokens, limit))
    if not lines:
        raise ConfigError(f"{path}: no request in it; {_EXPECTED} on each line")
    lines.sort(key=lambda line: line.timestamp)
    start_ms = lines[0].timestamp
    requests = tuple(
        TraceRequest(
            arrival_us=round((line.timestamp - start_ms) * 1000),
            input_tokens=line.input_length,
            output_tokens=line.output_length,
            hashes=chains.hashes(line.hash_ids),
        )
        for line in lines
    )
    return Trace(requests, tuple(chains.unique_by_position))


def _lines(path: Path, page_tokens: int, limit: int | None) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    num_read = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if num_read == limit:
                    return
                if text.strip():
                    num_read += 1
                    yield _parse(decoder, text, f"{path}, line {number}", page_tokens)
    except OSError as error:
        raise ConfigError(f"--trace {path}: can't be read ({error.strerror}); name a trace file") from error


def _parse(decoder: "msgspec.json.Decoder[_Line]", text: bytes, where: str, page_tokens: int) -> _Line:
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = clip(text.decode("utf-8", "replace").strip())
        raise ConfigError(f"{where}: {error} in {shown!r}; {_EXPECTED}") from error
    least, most = line.input_length // page_tokens, ceil_div(line.input_length, page_tokens)
    if not least <= len(line.hash_ids) <= most:
        raise ConfigError(
            f"{where}: {len(line.hash_ids)} hash ids for {line.input_length} tokens; expected "
            f"{most} at {page_tokens} tokens each; --page-tokens says how many one stands for"
        )
    return line
