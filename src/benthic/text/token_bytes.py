"""The bytes of every token of a vocabulary, for byte-level BPE and for sentencepiece models with byte fallback.

Decoding token by token as text loses what a partial character is made of; bytes don't. The two families write bytes
into their vocabulary in different ways, and a tokenizer's decoder says which.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from benthic.common.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Token id → bytes; ids past the vocabulary (padding rows of the embedding) are empty."""

    def __init__(self, table: list[bytes], special: Collection[int], strip_start: int = 0) -> None:
        self._table = table
        self._special = frozenset(special)
        self.strip_start = strip_start  # leading spaces that a decode of a whole text drops
        self.longest = max((len(b) for b in table), default=1) or 1  # bytes; bounds a text's tokens from below

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, special ones included."""
        return self._table[token] if 0 <= token < len(self._table) else b""

    def is_special(self, token: int) -> bool:
        """Whether the token is markup that a decode skips by default."""
        return token in self._special

    def join(self, tokens: Collection[int], *, skip_special: bool = False) -> bytes:
        """The bytes of a sequence."""
        return b"".join(self.bytes_of(t) for t in tokens if not (skip_special and self.is_special(t)))


def build_token_bytes(vocab: Mapping[str, int], special: Collection[int], decoder: Mapping[str, Any]) -> TokenBytes:
    """The table for `vocab` (token text → id) under a `tokenizers` decoder (its JSON form).

    Raises ModelError for a decoder that is neither byte-level nor sentencepiece-like.
    """
    steps = _flatten(decoder)
    kinds = {str(step.get("type")) for step in steps}
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    if "ByteLevel" in kinds:
        char_to_byte = {char: byte for byte, char in enumerate(_byte_chars())}
        for text, token in vocab.items():
            table[token] = _from_byte_chars(text, char_to_byte)
        return TokenBytes(table, special)
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        marks = {_replaced(step) for step in steps if step.get("type") in ("Replace", "Metaspace")} - {None}
        fallback = "ByteFallback" in kinds
        for text, token in vocab.items():
            table[token] = _from_pieces(text, marks, fallback and token not in special)
        return TokenBytes(table, special, _strip_start(steps))
    raise ModelError(
        f"this tokenizer decodes with {', '.join(sorted(kinds))}; byte-level BPE and sentencepiece are supported"
    )


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _byte_chars() -> list[str]:
    """GPT-2's map from bytes to printable characters: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    chars = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in chars)
    chars.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [chars[byte] for byte in range(256)]


def _from_byte_chars(text: str, char_to_byte: Mapping[str, int]) -> bytes:
    try:
        return bytes(char_to_byte[char] for char in text)
    except KeyError:  # an added token in plain text, e.g. one with a space or CJK brackets: its own UTF-8
        return text.encode("utf-8", "replace")


def _replaced(step: Mapping[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return str(step.get("replacement", "▁")), " "
    pattern = step.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    return None if literal is None else (str(literal), str(step.get("content", "")))


def _from_pieces(text: str, marks: Collection[tuple[str, str] | None], fallback: bool) -> bytes:
    if fallback and (match := _BYTE_TOKEN.fullmatch(text)):
        return bytes([int(match[1], 16)])
    for mark in marks:
        if mark is not None:
            text = text.replace(*mark)
    return text.encode("utf-8", "replace")


def _strip_start(steps: list[Mapping[str, Any]]) -> int:
    for step in steps:
        if step.get("type") == "Strip" and step.get("content") == " ":
            return int(step.get("start", 0))
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return 1
    return 0
