"""One choice of an answer: raw tokens in, finished pieces of text with their log-probabilities out. Pure; knows no
engine.

A piece is only what is safe to send. Log-probabilities wait for the text of their token, so that they don't give away a
stop string either.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benthic.messages import FinishReason, Logprobs
from benthic.text.stream import Detokenizer, StopFinder
from benthic.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A generated token's log-probabilities and where its text begins."""

    logprobs: Logprobs
    data: bytes  # what the token adds to the text
    offset: int  # characters of the answer before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a choice has to send since the last piece."""

    index: int
    text: str = ""
    entries: tuple[Entry, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How a choice's tokens become text."""

    stops: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    strip_start: bool
    end_tokens: frozenset[int]  # tokens that end the answer and are not part of its text
    min_tokens: int  # no stop string is looked for before


@dataclass(slots=True)
class Choice:
    """The text of one choice as it grows; owns its detokenizer and its stop finder."""

    index: int
    rules: TextRules
    detokenizer: Detokenizer
    finder: StopFinder
    num_tokens: int = 0  # generated tokens that count for the usage
    finish: FinishReason | None = None
    sent_chars: int = 0
    _decoded_chars: int = 0
    _text: list[str] = field(default_factory=list)
    _entries: deque[Entry] = field(default_factory=deque)

    @classmethod
    def open(cls, index: int, rules: TextRules, table: TokenBytes) -> "Choice":
        """A choice without tokens."""
        detokenizer = Detokenizer(table, skip_special=rules.skip_special, strip_start=rules.strip_start)
        return cls(index, rules, detokenizer, StopFinder(rules.stops, include=rules.include_stop))

    def push(self, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> None:
        """Add tokens (with as many log-probabilities, or none); what comes after a stop string is ignored."""
        for at, token in enumerate(tokens):
            if self.finish is not None:
                return
            self.num_tokens += 1
            hidden = token in self.rules.end_tokens and not self.rules.include_stop
            if logprobs:
                data = b"" if hidden else self.detokenizer.bytes_of(token)
                self._entries.append(Entry(logprobs[at], data, self._decoded_chars))
            if not hidden:
                self._add(self.detokenizer.push(token))

    def end(self, reason: FinishReason) -> None:
        """The engine has finished the choice; what was held back is let go, unless a stop string had ended it
        before."""
        if self.finish is not None:
            return
        self._add(self.detokenizer.flush())
        if self.finish is None:
            self._text.append(self.finder.flush())
            self.finish = reason

    def take(self) -> Piece | None:
        """What can be sent now, or None. The piece with the finish reason is the last."""
        text = "".join(self._text)
        self._text.clear()
        self.sent_chars += len(text)
        entries = []
        done = self.finish is not None
        while self._entries and (self._entries[0].offset < self.sent_chars or (done and not self._cut_off())):
            entries.append(self._entries.popleft())
        if done:
            self._entries.clear()
        if not text and not entries and not done:
            return None
        return Piece(index=self.index, text=text, entries=tuple(entries), finish=self.finish)

    def _cut_off(self) -> bool:
        """Whether text was dropped at the end: a stop string that is not included."""
        return self._decoded_chars > self.sent_chars

    def _add(self, text: str) -> None:
        self._decoded_chars += len(text)
        if self.num_tokens < self.rules.min_tokens:
            self._text.append(text)
            return
        found = self.finder.push(text)
        self._text.append(found.text)
        if found.stopped:
            self.finish = "stop"
