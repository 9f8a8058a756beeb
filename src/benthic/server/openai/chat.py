"""`POST /v1/chat/completions`."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from benthic.common.errors import RequestError
from benthic.server.context import ServerContext
from benthic.server.generation import Generation
from benthic.server.openai.body import parse, read_body
from benthic.server.openai.endpoint import Plan, run_plan
from benthic.server.openai.hidden import hidden_rows
from benthic.server.openai.logprobs import chat_logprobs
from benthic.server.openai.prompts import read_messages
from benthic.server.openai.sampling import check_logprobs, read_wanted
from benthic.server.openai.schemas import ChatRequest
from benthic.server.openai.usage import usage_object
from benthic.server.tokenize import Prompt
from benthic.text.choice import Entry, Piece
from benthic.text.token_bytes import TokenBytes


async def create_chat_completion(context: ServerContext, request: Request) -> Response:
    """Answer one request. Raises RequestError."""
    limits = context.limits()
    body = await read_body(request)

    def read() -> tuple[ChatRequest, list[dict[str, str]]]:
        fields = parse(body, ChatRequest)
        context.check_model(fields.model)
        return fields, read_messages(fields.messages)

    fields, messages = await context.tokenizing.by_size(len(body), read)
    max_tokens, name = _max_tokens(fields)
    wanted = read_wanted(fields, max_tokens, context.defaults, limits, max_tokens_name=name, logprobs=_logprobs(fields))
    rules = context.prompt_rules()

    async def prepare() -> Sequence[Prompt]:
        kwargs = fields.chat_template_kwargs or {}
        return [await context.tokenizing.chat(messages, kwargs, wanted.cache_salt, rules)]

    def shape(prompts: Sequence[Prompt]) -> ChatShape:
        return ChatShape(fields, context.model_name, context.tokenizing.model.token_bytes)

    plan = Plan(
        wanted=wanted,
        num_prompts=1,
        prepare=prepare,
        shape=shape,
        stream=bool(fields.stream),
        chat=True,
        max_tokens_name=name,
        prompt_name="messages",
    )
    return await run_plan(context, request, plan, limits)


def _max_tokens(fields: ChatRequest) -> tuple[int | None, str]:
    """The bound and the name that the client used for it; the newer name wins where both are given and equal."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            "max_tokens and max_completion_tokens say the same thing; give one of them", param="max_completion_tokens"
        )
    if new is not None:
        return new, "max_completion_tokens"
    return old, "max_tokens"


def _logprobs(fields: ChatRequest) -> int | None:
    top = check_logprobs("top_logprobs", fields.top_logprobs)
    if fields.logprobs:
        return top or 0
    if top:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


class ChatShape:
    """The objects of a chat completion's answer."""

    def __init__(self, fields: ChatRequest, model_name: str, table: TokenBytes) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model_name
        self._table = table
        self._logprobs = bool(fields.logprobs)
        self._usage = bool(fields.stream_options and fields.stream_options.include_usage)
        self._hidden = bool(fields.return_hidden_states)

    async def opening(self, generation: Generation) -> Sequence[dict[str, Any]]:
        """One chunk a choice that says who speaks."""
        return [
            self._chunk(
                {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            )
            for i in range(len(generation.choices))
        ]

    def chunk(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        """A piece of one choice."""
        delta = {"content": piece.text} if piece.text or piece.entries else {}
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._entries(piece.entries) if piece.entries else None,
            "finish_reason": piece.finish,
        }
        if self._hidden and piece.finish is not None:
            choice["hidden_states"] = hidden_rows(generation, piece.index)
        return self._chunk(choice)

    def usage_chunk(self, generation: Generation) -> dict[str, Any] | None:
        """All counts, and no choice."""
        return self._chunk() | {"usage": usage_object(generation.usage())} if self._usage else None

    def whole(self, pieces: Sequence[Piece], generation: Generation) -> dict[str, Any]:
        """The answer in one object."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._whole_choice(choice.index, pieces, generation) for choice in generation.choices],
            "usage": usage_object(generation.usage()),
        }

    def _whole_choice(self, index: int, pieces: Sequence[Piece], generation: Generation) -> dict[str, Any]:
        own = [piece for piece in pieces if piece.index == index]
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in own), "refusal": None},
            "logprobs": self._entries([entry for piece in own for entry in piece.entries]),
            "finish_reason": own[-1].finish,
        }
        if self._hidden:
            choice["hidden_states"] = hidden_rows(generation, index)
        return choice

    def _entries(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        return chat_logprobs(entries, self._table) if self._logprobs else None

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }
        return body | {"usage": None} if self._usage else body
