"""From generated tokens to text that is safe to send: incremental UTF-8, and stop strings that never leak.

The one thing to know: text leaves here only when nothing that may still come can change it. So the pieces, joined,
are the text of the whole, whatever the cuts between them.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from benthic.text.token_bytes import TokenBytes


class Detokenizer:
    """Tokens in, text out; owns the undecoded bytes of one sequence.

    A partial UTF-8 sequence is held back until it is whole or can't become whole (then it is U+FFFD, as in a decode
    of everything).
    """

    def __init__(self, table: TokenBytes, *, skip_special: bool = True, strip_start: bool = False) -> None:
        self._table = table
        self._skip_special = skip_special
        self._strip = table.strip_start if strip_start else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def bytes_of(self, token: int) -> bytes:
        """What `token` adds to the text, in bytes: nothing for a hidden special token."""
        if self._skip_special and self._table.is_special(token):
            return b""
        return self._table.bytes_of(token)

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        return self._decode(self.bytes_of(token), final=False)

    def flush(self) -> str:
        """What is left at the end: a replacement mark if the last character never became whole."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        while self._strip and text:  # a sentencepiece model's first word carries a space that is not part of the text
            if text[0] != " ":
                self._strip = 0
            else:
                self._strip -= 1
                text = text[1:]
        return text


@dataclass(frozen=True, slots=True)
class Found:
    """What a push to the finder made safe to send, and whether a stop string ended the text there."""

    text: str
    stopped: bool


class StopFinder:
    """Looks for stop strings across pieces; owns the text that may be the beginning of one.

    Of several stops the one that ends first counts, as in a scan character by character; of those that end together
    the longest.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> Found:
        """Add `text`; after `stopped` the finder must not be used again."""
        if not self._stops:
            return Found(text, False)
        if not text:
            return Found("", False)
        buffer = self._held + text
        hit = self._first(buffer)
        if hit is not None:
            start, end = hit
            self._held = ""
            return Found(buffer[: end if self._include else start], True)
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return Found(buffer[: len(buffer) - keep], False)

    def flush(self) -> str:
        """The near miss that was held back when the text ended."""
        held, self._held = self._held, ""
        return held

    def _first(self, buffer: str) -> tuple[int, int] | None:
        """(start, end) of the stop that ends first. The first occurrence of a stop is also the first of its ends."""
        hits = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if not hits:
            return None
        end, start = min(hits)
        return start, end


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
