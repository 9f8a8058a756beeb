"""The tokenizer of a checkpoint as the server uses it: fast, from several threads, and with the bytes of every
token."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from benthic.common.errors import ModelError, RequestError
from benthic.common.show import clip
from benthic.text.token_bytes import build_token_bytes


class CheckpointText:
    """Implements `TextModel` over a transformers tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        decoder = self._backend.decoder
        if decoder is None:
            raise ModelError("this tokenizer has no decoder; its tokens can't be turned into text")
        special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
        self.token_bytes = build_token_bytes(tokenizer.get_vocab(), special, json.loads(decoder.__getstate__()))
        self.has_chat_template = tokenizer.chat_template is not None
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Raises RequestError 400 for text that is not Unicode (lone surrogates)."""
        try:  # the batch call releases the interpreter lock, the single one does not
            encoded = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except UnicodeEncodeError:
            raise RequestError("the text holds half of a surrogate pair, which is no character") from None
        return list(encoded[0].ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]) -> str:
        """The template's output, ready for an answer. `kwargs` are its variables."""
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        taken = self._reserved & set(kwargs)
        if taken:
            raise RequestError(f"chat_template_kwargs: {min(taken)} can't be set", param="chat_template_kwargs")
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **kwargs
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refuses this: {clip(str(error), 200)}", param="messages") from None
        return str(rendered)
