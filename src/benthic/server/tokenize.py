"""Text to prompts, in threads: chat template, tokenization and the content hashes of whole pages. Never on the event
loop."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from benthic.common.errors import RequestError
from benthic.common.show import clip
from benthic.kvcache.hashing import page_hashes, root_hash
from benthic.text.token_bytes import TokenBytes

T = TypeVar("T")
SMALL_BYTES = 64 << 10  # a body that is read in well under a millisecond


class TextModel(Protocol):
    """What the server needs of a tokenizer. All methods may be called from several threads."""

    token_bytes: TokenBytes
    has_chat_template: bool

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""

    def render_chat(self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]) -> str:
        """The chat template's output, ready for an answer. Raises RequestError 400 where the template refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, ready for the engine."""

    ids: bytes  # int32
    root: bytes
    hashes: bytes
    text: str | None  # as the client gave it; None for token ids

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4

    def tokens(self) -> list[int]:
        """The ids as Python numbers."""
        return [int(token) for token in np.frombuffer(self.ids, dtype="<i4")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """What a prompt is prepared and checked against."""

    namespace: bytes
    page_size: int
    max_request_tokens: int
    limit_reason: str
    vocab_size: int


class Tokenizing:
    """A small pool of threads for all that takes time with the text of a request; tokenizers release the interpreter
    lock."""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self._pool = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)), thread_name_prefix="tokenize")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def by_size(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Run `work` here if it is about few bytes, else in the pool, where Python code lets the event loop in
        between."""
        return work() if num_bytes <= SMALL_BYTES else await self.in_thread(work)

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prompts(self, prompts: Sequence[str | list[int]], salt: str, rules: PromptRules) -> list[Prompt]:
        """Prepare a completion's prompts. Raises RequestError 400."""
        return await self.in_thread(lambda: [self._prepare(p, salt, rules, special=True) for p in prompts])

    async def chat(
        self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any], salt: str, rules: PromptRules
    ) -> Prompt:
        """Prepare a conversation. The template writes the special tokens itself, so none are added. Raises
        RequestError."""

        def work() -> Prompt:
            return self._prepare(self.model.render_chat(messages, kwargs), salt, rules, special=False, name="messages")

        return await self.in_thread(work)

    def _prepare(
        self, prompt: str | list[int], salt: str, rules: PromptRules, *, special: bool, name: str = "prompt"
    ) -> Prompt:
        if isinstance(prompt, str):
            self._check_text(prompt, rules, name)
            tokens = self.model.encode(prompt, add_special_tokens=special)
        else:
            tokens = prompt
        if not tokens:
            raise RequestError(
                f"the {name} is empty: it has no tokens, and this model adds no start token; give at least one",
                param=name,
            )
        ids = _to_bytes(tokens, rules, name)
        root = root_hash(rules.namespace, salt)
        hashes = b"".join(page_hashes(root, ids, rules.page_size)) if len(tokens) <= rules.max_request_tokens else b""
        return Prompt(ids=ids, root=root, hashes=hashes, text=prompt if isinstance(prompt, str) else None)

    def _check_text(self, text: str, rules: PromptRules, name: str) -> None:
        """Refuse without tokenizing what is too long whatever its tokens are: a second of work for 30 MB otherwise."""
        at_least = len(text) // self.model.token_bytes.longest
        if at_least > rules.max_request_tokens:
            raise RequestError(
                f"the {name} has at least {at_least} tokens; a request may have {rules.max_request_tokens} "
                f"({rules.limit_reason}), at least one of them generated",
                param=name,
                code="context_length_exceeded",
            )


def _to_bytes(tokens: Sequence[int], rules: PromptRules, name: str) -> bytes:
    try:
        ids = np.asarray(tokens, dtype=np.int64)
    except OverflowError:
        raise RequestError(
            f"{name}: a token id is out of range; ids go from 0 to {rules.vocab_size - 1}", param=name
        ) from None
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rules.vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"{name}: {clip(wrong)} is not a token; ids go from 0 to {rules.vocab_size - 1}", param=name)
    return ids.astype("<i4").tobytes()
