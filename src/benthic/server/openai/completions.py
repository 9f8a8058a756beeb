"""`POST /v1/completions`."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from benthic.server.context import ServerContext
from benthic.server.generation import Generation
from benthic.server.openai.body import parse, read_body
from benthic.server.openai.endpoint import Plan, run_plan
from benthic.server.openai.hidden import hidden_rows
from benthic.server.openai.logprobs import completion_logprobs, merge_columns, prompt_columns
from benthic.server.openai.prompts import read_prompts
from benthic.server.openai.sampling import check_logprobs, read_wanted
from benthic.server.openai.schemas import CompletionRequest
from benthic.server.openai.usage import usage_object
from benthic.server.tokenize import Prompt
from benthic.text.choice import Piece
from benthic.text.token_bytes import TokenBytes


async def create_completion(context: ServerContext, request: Request) -> Response:
    """Answer one request. Raises RequestError."""
    limits = context.limits()
    body = await read_body(request)

    def read() -> tuple[CompletionRequest, list[str | list[int]]]:
        fields = parse(body, CompletionRequest)
        context.check_model(fields.model)
        return fields, read_prompts(fields.prompt)

    fields, texts = await context.tokenizing.by_size(len(body), read)
    logprobs = check_logprobs("logprobs", fields.logprobs)
    wanted = read_wanted(
        fields,
        fields.max_tokens,
        context.defaults,
        limits,
        least_max_tokens=0 if fields.echo else 1,
        logprobs=logprobs,
        prompt_logprobs=logprobs if fields.echo else None,
    )
    rules = context.prompt_rules()

    async def prepare() -> Sequence[Prompt]:
        return await context.tokenizing.prompts(texts, wanted.cache_salt, rules)

    def shape(prompts: Sequence[Prompt]) -> CompletionShape:
        return CompletionShape(fields, context.model_name, context.tokenizing.model.token_bytes, prompts, wanted.n)

    plan = Plan(
        wanted=wanted,
        num_prompts=len(texts),
        prepare=prepare,
        shape=shape,
        stream=bool(fields.stream),
        chat=False,
        max_tokens_name="max_tokens",
        prompt_name="prompt",
        generated=fields.max_tokens != 0,
    )
    return await run_plan(context, request, plan, limits)


class CompletionShape:
    """The objects of a completion's answer."""

    def __init__(
        self, fields: CompletionRequest, model_name: str, table: TokenBytes, prompts: Sequence[Prompt], n: int
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model_name
        self._table = table
        self._n = n
        self._logprobs = fields.logprobs is not None
        self._usage = bool(fields.stream_options and fields.stream_options.include_usage)
        self._hidden = bool(fields.return_hidden_states)
        self._prompts = prompts
        self._echo = [_prompt_text(prompt, table) for prompt in prompts] if fields.echo else None

    async def opening(self, generation: Generation) -> Sequence[dict[str, Any]]:
        """The echoed prompts."""
        if self._echo is None:
            return ()
        if self._logprobs:
            await generation.prompts_scored()
        return [
            self._object(
                [
                    {
                        "index": i,
                        "text": self._echo[i // self._n],
                        "logprobs": self._prompt_logprobs(i, generation),
                        "finish_reason": None,
                    }
                ]
            )
            for i in range(len(generation.choices))
        ]

    def chunk(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        """A piece of one choice."""
        logprobs = self._piece_logprobs(piece) if self._logprobs and piece.entries else None
        choice = {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
        if self._hidden and piece.finish is not None:
            choice["hidden_states"] = hidden_rows(generation, piece.index)
        return self._object([choice])

    def usage_chunk(self, generation: Generation) -> dict[str, Any] | None:
        """All counts, and no choice."""
        return self._object([]) | {"usage": usage_object(generation.usage())} if self._usage else None

    def whole(self, pieces: Sequence[Piece], generation: Generation) -> dict[str, Any]:
        """The answer in one object."""
        choices = [self._whole_choice(choice.index, pieces, generation) for choice in generation.choices]
        self._usage = False
        return self._object(choices) | {"usage": usage_object(generation.usage())}

    def _whole_choice(self, index: int, pieces: Sequence[Piece], generation: Generation) -> dict[str, Any]:
        own = [piece for piece in pieces if piece.index == index]
        echo = "" if self._echo is None else self._echo[index // self._n]
        logprobs = None
        if self._logprobs:
            entries = [entry for piece in own for entry in piece.entries]
            logprobs = completion_logprobs(entries, self._table, len(echo))
            if self._echo is not None:
                logprobs = merge_columns(self._prompt_columns(index, generation), logprobs)
        choice = {
            "index": index,
            "text": echo + "".join(piece.text for piece in own),
            "logprobs": logprobs,
            "finish_reason": own[-1].finish,
        }
        if self._hidden:
            choice["hidden_states"] = hidden_rows(generation, index)
        return choice

    def _piece_logprobs(self, piece: Piece) -> dict[str, Any]:
        offset = 0 if self._echo is None else len(self._echo[piece.index // self._n])
        return completion_logprobs(piece.entries, self._table, offset)

    def _prompt_logprobs(self, index: int, generation: Generation) -> dict[str, Any] | None:
        return self._prompt_columns(index, generation) if self._logprobs else None

    def _prompt_columns(self, index: int, generation: Generation) -> dict[str, Any]:
        prompt = self._prompts[index // self._n]
        return prompt_columns(prompt.tokens(), generation.feeds[index].prompt_logprobs, self._table)

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return body | {"usage": None} if self._usage else body


def _prompt_text(prompt: Prompt, table: TokenBytes) -> str:
    if prompt.text is not None:
        return prompt.text
    return table.join(prompt.tokens()).decode("utf-8", "replace")
