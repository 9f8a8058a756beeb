"""A real server for benchmarks: `benthic serve` on a free port, ended in order."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

READY_S = 600


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a streamed request brought: seconds to its first token, the usage's prompt details, the whole text."""

    seconds: float
    details: dict[str, Any]
    text: str


def first_token(client: httpx.Client, model: str, ids: list[int], max_tokens: int = 1) -> FirstToken:
    """Stream one greedy request. Raises AssertionError for a stream without a token."""
    body = {
        "model": model, "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    first, text = 0.0, ""
    details: dict[str, Any] = {}
    start = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"]:
                first = first or time.perf_counter() - start
                text += event["choices"][0]["text"]
            if event.get("usage"):
                details = event["usage"]["prompt_tokens_details"]
    assert first, "the stream ended without a token"
    return FirstToken(first, details, text)


@contextmanager
def serve(model: str, *flags: str) -> Iterator[str]:
    """The address of a ready server; SIGTERM at the end."""
    command = [sys.executable, "-m", "benthic", "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _wait_until_ready(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _wait_until_ready(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            url = match[0]
            break
    else:
        raise RuntimeError("the server ended before it listened:\n" + "".join(seen))
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if httpx.get(url + "/ready").status_code == 200:
            return url
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {READY_S} s")
