"""The endpoints that generate nothing: health, models, metrics, tokenizer and cache."""

import time
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from benthic.common.errors import EngineDead, RequestError
from benthic.server.cache_state import cache_object, flush_object, flush_tiers
from benthic.server.context import ServerContext
from benthic.server.openai.body import parse, read_body
from benthic.server.openai.errors import error_response
from benthic.server.openai.prompts import read_messages
from benthic.server.openai.schemas import DetokenizeRequest, FlushRequest, TokenizeRequest
from benthic.text.stream import Detokenizer

STATE_TIMEOUT_S = 2.0  # then /cache shows the last known state
FLUSH_TIMEOUT_S = 120.0  # a flush waits for the end of a tick


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def health(context: ServerContext, _: Request) -> Response:
    """Whether the process and its engine live; says nothing about requests."""
    state = context.state
    if state.unhealthy is not None:
        return json_response({"status": "unhealthy", "reason": state.unhealthy}, 503)
    status = "stopping" if state.draining else "loading" if state.ready is None else "ok"
    return json_response({"status": status})


async def ready(context: ServerContext, _: Request) -> Response:
    """Whether requests are taken. A refusal here is an answer to a probe and counts as no refused request."""
    try:
        context.engine()
    except RequestError as error:
        return error_response(error)
    return json_response({"status": "ready", "model": context.model_name})


async def metrics(context: ServerContext, _: Request) -> Response:
    """Prometheus text."""
    return Response(context.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


async def models(context: ServerContext, _: Request) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model(context)]})


async def model(context: ServerContext, request: Request) -> Response:
    """The model by its name."""
    described = _model(context)
    context.check_model(request.path_params["name"])
    return json_response(described)


def _model(context: ServerContext) -> dict[str, Any]:
    engine = context.engine()
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "benthic",
        "max_model_len": engine.max_request_tokens,
    }


async def tokenize(context: ServerContext, request: Request) -> Response:
    """Text or messages to token ids."""
    engine = context.engine()
    fields = parse(await read_body(request), TokenizeRequest)
    context.check_model(fields.model)
    text_model = context.tokenizing.model
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")

    def work() -> list[int]:
        if fields.prompt is not None:
            return text_model.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
        rendered = text_model.render_chat(read_messages(fields.messages), fields.chat_template_kwargs or {})
        return text_model.encode(rendered, add_special_tokens=False)

    tokens = await context.tokenizing.in_thread(work)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_request_tokens})


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Token ids to text."""
    engine = context.engine()
    fields = parse(await read_body(request), DetokenizeRequest)
    context.check_model(fields.model)

    def work() -> str:
        for token in fields.tokens:
            if not 0 <= token < engine.vocab_size:
                raise RequestError(
                    f"tokens: {str(token)[:40]} is not a token; ids go from 0 to {engine.vocab_size - 1}",
                    param="tokens",
                )
        table = context.tokenizing.model.token_bytes
        decoder = Detokenizer(table, skip_special=bool(fields.skip_special_tokens), strip_start=True)
        return "".join(decoder.push(token) for token in fields.tokens) + decoder.flush()

    return json_response({"prompt": await context.tokenizing.in_thread(work)})


async def cache(context: ServerContext, _: Request) -> Response:
    """The tiers' state; the last known one, with its age, when the engine is in a long tick."""
    context.engine()
    try:
        context.last_cache = (time.monotonic(), await context.client.state(STATE_TIMEOUT_S))
    except TimeoutError:
        if context.last_cache is None:
            raise RequestError(
                f"the engine is busy: no state within {STATE_TIMEOUT_S:g} s; try again", status=503
            ) from None
    except EngineDead as error:
        raise RequestError(f"the engine ended: {error}", status=503) from None
    at, state = context.last_cache
    return json_response(cache_object(state, context.rank_disks, time.monotonic() - at))


async def flush_cache(context: ServerContext, request: Request) -> Response:
    """Drop every copy in the named tiers (default l1 and l2) that no lock, operation or copy below needs."""
    context.engine()
    body = await read_body(request)
    tiers = flush_tiers(parse(body, FlushRequest) if body.strip() else FlushRequest())
    try:
        done = await context.client.flush(tiers, FLUSH_TIMEOUT_S)
    except TimeoutError:
        raise RequestError(
            f"the engine did not answer within {FLUSH_TIMEOUT_S:g} s; the flush may still happen", status=503
        ) from None
    except EngineDead as error:
        raise RequestError(f"the engine ended: {error}", status=503) from None
    return json_response(flush_object(done))
