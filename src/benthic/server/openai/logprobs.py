"""Log-probabilities in the two shapes of OpenAI's API, with the true bytes of every token."""

from collections.abc import Sequence
from typing import Any

from benthic.messages import Logprobs
from benthic.text.choice import Entry
from benthic.text.token_bytes import TokenBytes


def token_text(data: bytes) -> str:
    """A token as text; one with part of a character is written like `bytes: \\xf0\\x9f`, as OpenAI does: tokens stay
    distinct."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: Sequence[Entry], table: TokenBytes) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion. A token that adds nothing to the text has no bytes."""
    return {"content": [_chat_entry(entry, table) for entry in entries], "refusal": None}


def _chat_entry(entry: Entry, table: TokenBytes) -> dict[str, Any]:
    top = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=True)
    return {
        "token": token_text(table.bytes_of(entry.logprobs.token)),
        "logprob": _finite(entry.logprobs.logprob),
        "bytes": list(entry.data),
        "top_logprobs": [
            {"token": token_text(data), "logprob": _finite(value), "bytes": list(data)}
            for data, value in ((table.bytes_of(token), value) for token, value in top)
        ],
    }


def completion_logprobs(entries: Sequence[Entry], table: TokenBytes, offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` characters (an echoed prompt) stand before the answer."""
    return _columns(
        [table.bytes_of(entry.logprobs.token) for entry in entries],
        [entry.logprobs for entry in entries],
        [entry.offset + offset for entry in entries],
        table,
    )


def prompt_columns(tokens: Sequence[int], logprobs: Sequence[Logprobs], table: TokenBytes) -> dict[str, Any]:
    """The same for an echoed prompt: its first token has no log-probability."""
    data = [table.bytes_of(token) for token in tokens]
    offsets, pending, chars = [], b"", 0
    for piece in data:
        offsets.append(chars)
        pending += piece
        whole = _whole_prefix(pending)
        chars += len(pending[:whole].decode("utf-8", "replace"))
        pending = pending[whole:]
    columns = _columns(data[1:], logprobs, offsets[1:], table)
    return {
        "tokens": [token_text(data[0]), *columns["tokens"]],
        "token_logprobs": [None, *columns["token_logprobs"]],
        "top_logprobs": None if columns["top_logprobs"] is None else [None, *columns["top_logprobs"]],
        "text_offset": [0, *columns["text_offset"]],
    }


def merge_columns(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Prompt, then answer."""
    joined = {key: first[key] + second[key] for key in ("tokens", "token_logprobs", "text_offset")}
    tops = [part["top_logprobs"] or [] for part in (first, second)]
    return joined | {"top_logprobs": tops[0] + tops[1] or None}


def _columns(
    data: Sequence[bytes], logprobs: Sequence[Logprobs], offsets: Sequence[int], table: TokenBytes
) -> dict[str, Any]:
    tops = [
        {
            token_text(table.bytes_of(token)): _finite(value)
            for token, value in zip(position.top_ids, position.top_logprobs, strict=True)
        }
        for position in logprobs
    ]
    return {
        "tokens": [token_text(piece) for piece in data],
        "token_logprobs": [_finite(position.logprob) for position in logprobs],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": list(offsets),
    }


def _finite(value: float) -> float:
    """JSON has no infinity; a forbidden token shows as OpenAI's floor."""
    return max(value, -9999.0)


def _whole_prefix(data: bytes) -> int:
    """Bytes of `data` before a last character that may still become whole."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return len(data) - back if need > back else len(data)
    return len(data)
