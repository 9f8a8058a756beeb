"""How a request becomes an HTTP answer: one JSON object, or a stream of server-sent events. Both end when the client
goes away.

The endpoints give their shapes through `AnswerShape`; here is what is the same for both.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from benthic.common.errors import RequestError
from benthic.server.generation import Generation
from benthic.server.openai.errors import error_body
from benthic.text.choice import Piece

logger = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class AnswerShape(Protocol):
    """The objects of one endpoint's answers."""

    id: str

    async def opening(self, generation: Generation) -> Sequence[dict[str, Any]]:
        """Chunks before the first piece."""

    def chunk(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        """The chunk for a piece."""

    def usage_chunk(self, generation: Generation) -> dict[str, Any] | None:
        """The last chunk, where the client asked for it."""

    def whole(self, pieces: Sequence[Piece], generation: Generation) -> dict[str, Any]:
        """The answer without a stream, from all pieces."""


async def answer_whole(request: Request, generation: Generation, shape: AnswerShape) -> Response:
    """Wait for every choice, or until the client goes away. Raises RequestError."""

    async def collect() -> list[Piece]:
        return [piece async for piece in generation.pieces()]

    pieces = await unless_gone(request.receive, collect())
    if pieces is None:
        logger.debug("%s: the client went away", shape.id)
        return Response(status_code=499)
    log_end(shape, generation)
    body = msgspec.json.encode(shape.whole(pieces, generation))
    return Response(body, media_type="application/json", headers={"x-request-id": shape.id})


def log_end(shape: AnswerShape, generation: Generation) -> None:
    """One line for a request that was answered in full."""
    usage = generation.usage()
    logger.debug(
        "%s: %d prompt tokens (%d cached), %d generated in %d choices",
        shape.id,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        len(generation.choices),
    )


async def unless_gone(receive: Receive, work: Any) -> Any:
    """The result of `work`, or None when the client disconnects first (then `work` is cancelled)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has closed its connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """The answer of a stream. Owns the generation from here on and always closes it."""

    def __init__(self, generation: Generation, shape: AnswerShape) -> None:
        super().__init__()
        self._generation = generation
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the answer ends or the client is gone."""
        try:
            await unless_gone(receive, self._send_all(send))
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        headers = [*_HEADERS, (b"x-request-id", self._shape.id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._chunks():
                await send(_event(chunk))
        except RequestError as error:  # no [DONE]: the answer is not complete
            logger.warning("%s: ended with an error: %s", self._shape.id, error)
            await send(_event(error_body(error)))
        else:
            log_end(self._shape, self._generation)
            await send({"type": "http.response.body", "body": _DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        generation, shape = self._generation, self._shape
        for chunk in await shape.opening(generation):
            yield chunk
        async for piece in generation.pieces():
            yield shape.chunk(piece, generation)
        usage = shape.usage_chunk(generation)
        if usage is not None:
            yield usage


def _event(chunk: dict[str, Any]) -> Message:
    return {"type": "http.response.body", "body": b"data: " + msgspec.json.encode(chunk) + b"\n\n", "more_body": True}
