"""The web application: which path runs which endpoint, the key that clients must bring, and errors in OpenAI's
shape."""

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from benthic.common.errors import RequestError
from benthic.common.version import __version__
from benthic.server import routes
from benthic.server.context import ServerContext
from benthic.server.openai.chat import create_chat_completion
from benthic.server.openai.completions import create_completion
from benthic.server.openai.errors import error_response
from benthic.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FlushRequest,
    TokenizeRequest,
)

logger = logging.getLogger(__name__)
Endpoint = Callable[[ServerContext, Request], Awaitable[Response]]

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # probes and scrapers bring no key

_ROUTES: tuple[tuple[str, str, Endpoint, type[msgspec.Struct] | None], ...] = (
    ("POST", "/v1/completions", create_completion, CompletionRequest),
    ("POST", "/v1/chat/completions", create_chat_completion, ChatRequest),
    ("GET", "/v1/models", routes.models, None),
    ("GET", "/v1/models/{name:path}", routes.model, None),
    ("GET", "/health", routes.health, None),
    ("GET", "/ready", routes.ready, None),
    ("GET", "/metrics", routes.metrics, None),
    ("POST", "/tokenize", routes.tokenize, TokenizeRequest),
    ("POST", "/detokenize", routes.detokenize, DetokenizeRequest),
    ("GET", "/cache", routes.cache, None),
    ("POST", "/cache/flush", routes.flush_cache, FlushRequest),
)


def build_app(context: ServerContext) -> FastAPI:
    """The application over `context`. Bodies are parsed by our own schemas, so FastAPI sees plain requests."""
    app = FastAPI(title="Benthic", version=__version__, docs_url=None, redoc_url=None)
    for method, path, endpoint, body in _ROUTES:
        app.add_api_route(
            path,
            _bind(endpoint, context),
            methods=[method],
            summary=(endpoint.__doc__ or "").removesuffix(" Raises RequestError."),
            openapi_extra=_describe(body),
        )

    async def on_request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        context.metrics.count_refused(error.status)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: "there is no such path", 405: f"{request.method} is not allowed here"}
        message = what.get(error.status_code, str(error.detail))
        context.metrics.count_refused(error.status_code)
        return error_response(RequestError(message, status=error.status_code), dict(error.headers or {}))

    async def on_bug(request: Request, error: Exception) -> Response:
        context.metrics.count_refused(500)
        return error_response(RequestError("the server failed on this request; its log has the details", status=500))

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    if context.api_key is not None:
        app.add_middleware(KeyCheck, key=context.api_key)
    return app


def _bind(endpoint: Endpoint, context: ServerContext) -> Callable[[Request], Awaitable[Response]]:
    async def bound(request: Request) -> Response:
        return await endpoint(context, request)

    bound.__name__ = endpoint.__name__
    return bound


def _describe(body: type[msgspec.Struct] | None) -> dict[str, Any] | None:
    """The body's schema for /openapi.json."""
    if body is None:
        return None
    (schema,), parts = msgspec.json.schema_components([body], ref_template="#/$defs/{name}")
    schema = parts.pop(body.__name__, schema)
    return {"requestBody": {"content": {"application/json": {"schema": schema | ({"$defs": parts} if parts else {})}}}}


class KeyCheck:
    """Refuses requests without the right bearer token; compares in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
            status=401,
            code="invalid_api_key",
        )
        await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)
