"""A tokenizer that anyone can check by eye: token b is the byte b, 256 ends an answer, 257 starts a text where
asked."""

from collections.abc import Mapping, Sequence
from typing import Any

from benthic.common.errors import RequestError
from benthic.text.token_bytes import TokenBytes

END, START = 256, 257
VOCAB = 258


class TinyText:
    """Implements `TextModel`: one token a byte of UTF-8."""

    def __init__(self, *, start_token: bool = False) -> None:
        self.token_bytes = TokenBytes([bytes([b]) for b in range(256)] + [b"<end>", b"<start>"], {END, START})
        self.has_chat_template = True
        self._start = [START] if start_token else []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return (self._start if add_special_tokens else []) + list(text.encode())

    def render_chat(self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]) -> str:
        if kwargs.get("refuse"):
            raise RequestError("the template refuses", param="messages")
        return "".join(f"[{m['role']}]{m['content']}" for m in messages)
