"""One client of an OpenAI-compatible server for load runs: sends a streaming request, notes when text arrives.

Server-sent events as the OpenAI API writes them: lines `data: JSON`, the last one `data: [DONE]`.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from benthic.cli.bench_stats import RequestRecord
from benthic.common.errors import BenthicError, ConfigError

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class BrokenStream(Exception):
    """A stream that ended without the mark of a complete answer, or that carried an error."""


@dataclass(slots=True)
class _Answer:
    text_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)


def open_client(url: str, api_key: str | None, timeout_s: float) -> httpx.AsyncClient:
    """A client for the server at `url`, with as many connections as there are requests. Raises ConfigError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # the environment's proxy does not know this machine's own servers
    trust_env = not any(f"//{name}" in url for name in _LOOPBACK)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
    try:
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=trust_env)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}; write e.g. http://127.0.0.1:8000") from None


async def first_model(client: httpx.AsyncClient) -> str:
    """The first name in /v1/models. Raises BenthicError with what to do where there is none."""
    where = f"{str(client.base_url).rstrip('/')}/v1/models"
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = "; give the key with --api-key" if status in (401, 403) else ""
        raise BenthicError(f"{where} answered {status}{hint}, or name the model with --model") from None
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise BenthicError(f"no answer from {where}: {reason}; start a server (benthic serve) or give --url") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise BenthicError(f"{where} lists no model; name it with --model") from None


async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> RequestRecord:
    """Send one request and read its stream to the end; failures become the record's `error`."""
    sent_s, answer, error, detail = time.perf_counter(), _Answer(), None, ""
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                error, detail = f"HTTP {response.status_code}", error_message(response.text)
            else:
                await _read(response.aiter_lines(), answer)
    except BrokenStream as broken:
        error, detail = "broken stream", str(broken)
    except httpx.HTTPError as failure:
        error, detail = type(failure).__name__, str(failure)
    usage = answer.usage
    details = usage.get("prompt_tokens_details") or {}
    return RequestRecord(
        sent_s=sent_s,
        ended_s=time.perf_counter(),
        text_s=tuple(answer.text_s),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or len(answer.text_s),
        cached_tokens=details.get("cached_tokens") or 0,
        error=error,
        detail=detail,
    )


async def _read(lines: AsyncIterator[str], answer: _Answer) -> None:
    """Gather a stream into `answer`. Raises BrokenStream."""
    complete = False
    async for line in lines:
        now = time.perf_counter()
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            complete = True
            continue
        try:
            event = msgspec.json.decode(data)
            if event.get("error"):
                raise BrokenStream(str(event["error"].get("message", event["error"])))
            if any(_brings_text(choice) for choice in event["choices"]):
                answer.text_s.append(now)
            answer.usage = event.get("usage") or answer.usage
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
            raise BrokenStream("it holds an event that is not a completion chunk") from None
    if not complete:
        raise BrokenStream("it ended before its [DONE]")


def _brings_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def error_message(body: str) -> str:
    """The message in an OpenAI-shaped error, or the beginning of what came instead; one line of 200 characters."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = body
    return " ".join(message.split())[:200]
