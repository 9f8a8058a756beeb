"""Errors in OpenAI's shape. An error never echoes more than a few words of what the client sent."""

from typing import Any

import msgspec
from starlette.responses import Response

from benthic.common.errors import RequestError
from benthic.common.show import clip

MAX_ERROR_BYTES = 4096
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_body(error: RequestError) -> dict[str, Any]:
    """The object that goes into a response or a stream event; below MAX_ERROR_BYTES as JSON."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    body = {
        "message": clip(str(error), 600),
        "type": kind,
        "param": None if error.param is None else clip(error.param, 80),
        "code": error.code or error.status,
    }
    return {"error": body}


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """The HTTP answer for `error`."""
    content = msgspec.json.encode(error_body(error))
    if error.status == 429:
        headers = {"retry-after": "1"} | (headers or {})
    return Response(content, status_code=error.status, media_type="application/json", headers=headers)
