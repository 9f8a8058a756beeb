"""From the bytes of a request's body to a typed request, or an error that names the field.

The body is read with a bound, parsed by msgspec, and its keys are checked one by one, so that an error is about one
field and short, whatever was sent.
"""

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from benthic.common.errors import RequestError
from benthic.common.show import clip
from benthic.common.units import format_size
from benthic.server.openai.schemas import IGNORED, UNSUPPORTED

MAX_BODY_BYTES = 32 << 20

T = TypeVar("T", bound=msgspec.Struct)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. Raises RequestError 413 as soon as it is known to pass `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
    except ClientDisconnect:
        raise RequestError("the client went away while it sent its request", status=499) from None
    return b"".join(parts)


def _too_large(size: int, limit: int) -> RequestError:
    return RequestError(
        f"the request's body has {size} bytes or more; the limit is {limit} bytes ({format_size(limit)})", status=413
    )


def parse(data: bytes, kind: type[T]) -> T:
    """`data` as a `kind`. Raises RequestError 400 that names the field."""
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request's body is not valid JSON: {clip(str(error), 200)}") from None
    except RecursionError:
        raise RequestError("the request's body is nested too deeply") from None
    if not isinstance(values, dict):
        raise RequestError(f"the request's body must be a JSON object, not {_json_name(values)}")
    check_fields(values, {field.encode_name for field in msgspec.structs.fields(kind)})
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def check_fields(values: dict[str, Any], known: set[str]) -> None:
    """Refuse what the endpoint does not know or support. A null, or what is the default anyway, changes nothing and
    passes."""
    for name, value in values.items():
        if name in known or name in IGNORED:
            continue
        if name in UNSUPPORTED:
            if value is None or (name == "response_format" and value == {"type": "text"}):
                continue
            raise RequestError(f"{name} is not supported by this server; leave it out", param=name)
        raise RequestError(f"unknown field {clip(name)!r}", param=name, code="unknown_field")


def _invalid(text: str) -> RequestError:
    match = _PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, None)
    what = what.replace(" | null", "")
    if not path:
        missing = re.search(r"required field `(\w+)`", what)
        return RequestError(f"{clip(what, 200)}", param=missing[1] if missing else None)
    return RequestError(f"{clip(path)}: {clip(what[:1].lower() + what[1:], 200)}", param=path)


def _json_name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
