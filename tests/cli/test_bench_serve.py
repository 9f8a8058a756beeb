"""The load generator against a small real server that speaks server-sent events."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner, Result

from benthic.cli import bench_serve
from benthic.common.errors import BenthicError, ConfigError

WORDS = 4


class Backend:
    """A server that answers with four words; `behaviour` of the n-th request, else `good`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.behaviour: dict[int, str] = {}
        self.stalled = threading.Event()
        self.in_flight = self.most_in_flight = 0
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        app = Starlette(routes=routes)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    async def models(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [{"id": "small", "object": "model"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        behaviour = self.behaviour.get(len(self.bodies) - 1, "good")
        if behaviour == "full":
            return JSONResponse({"error": {"message": "the queue is full", "type": "rate_limit"}}, status_code=429)
        return StreamingResponse(self.stream(body, behaviour), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], behaviour: str) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if behaviour == "stall":
            self.stalled.set()
            await asyncio.sleep(3600)  # until the client goes away
        for word in range(WORDS):
            if behaviour == "error" and word == 2:
                yield event({"error": {"message": "the engine has ended"}})
                break
            choice = {"delta": {"content": "word "}} if "messages" in body else {"text": "word "}
            yield event({"choices": [{"index": 0, "finish_reason": None, **choice}]})
        usage = {"prompt_tokens": 10, "completion_tokens": WORDS, "prompt_tokens_details": {"cached_tokens": 5}}
        yield event({"choices": [], "usage": usage})
        self.in_flight -= 1
        if behaviour != "cut":
            yield "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend()
    backend.thread.start()
    yield backend
    backend.server.should_exit = True
    backend.thread.join()
    backend.socket.close()


def run(*arguments: str) -> Result:
    app = typer.Typer()
    bench_serve.register(app)
    return CliRunner().invoke(app, [*arguments, "--json"])


def figures(result: Result) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def test_all_requests_are_sent_and_counted(backend: Backend) -> None:
    result = run("--url", backend.url, "--num-requests", "12", "--concurrency", "3", "--input-tokens", "10",
                 "--shared-prefix-tokens", "4", "--output-tokens", "7", "--api-key", "s3cret")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = figures(result)
    assert (found["ok"], found["failed"], found["input_tokens"], found["output_tokens"]) == (12, 0, 120, 12 * WORDS)
    assert found["cached_share"] == 0.5
    assert found["ttft_s"]["mean"] <= found["e2e_s"]["mean"]
    assert found["complete"] is True
    assert backend.most_in_flight <= 3
    assert backend.keys == {"Bearer s3cret"}
    prompts = [body["prompt"] for body in backend.bodies]
    assert len({tuple(p) for p in prompts}) == 12
    assert len({tuple(p[:4]) for p in prompts}) == 1
    assert {(body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) for body in backend.bodies} == {
        ("small", 7, True, True)
    }


def test_chat_and_a_rate(backend: Backend) -> None:
    result = run("--url", backend.url + "/v1/", "--model", "mine", "--num-requests", "5", "--rate", "500", "--chat",
                 "--no-ignore-eos", "--input-tokens", "6")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert figures(result)["output_tokens"] == 5 * WORDS
    assert all(len(body["messages"][0]["content"].split()) == 6 for body in backend.bodies)
    assert all(body["model"] == "mine" and "ignore_eos" not in body for body in backend.bodies)


def test_failures_are_shown_by_status_and_do_not_end_the_run(backend: Backend) -> None:
    backend.behaviour = {1: "full", 2: "error", 3: "cut", 4: "full"}
    result = run("--url", backend.url, "--num-requests", "6", "--concurrency", "1", "--input-tokens", "4")
    assert result.exit_code == 0, result.output
    found = figures(result)
    assert (found["ok"], found["failed"]) == (2, 4)
    assert found["errors"] == {"HTTP 429": 2, "broken stream": 2}
    assert found["examples"] == {"HTTP 429": "the queue is full", "broken stream": "the engine has ended"}
    assert "2; the queue is full" in result.stdout


def test_no_success_at_all_is_an_exit_code(backend: Backend) -> None:
    backend.behaviour = {0: "full", 1: "full"}
    result = run("--url", backend.url, "--num-requests", "2", "--input-tokens", "4")
    assert result.exit_code == 1
    assert figures(result)["ok"] == 0


def test_ctrl_c_shows_what_was_gathered(backend: Backend) -> None:
    backend.behaviour = {3: "stall"}
    program = "import typer; from benthic.cli import bench_serve as b; app = typer.Typer(); b.register(app); app()"
    flags = ["--url", backend.url, "--num-requests", "9", "--concurrency", "1", "--input-tokens", "4", "--json"]
    client = subprocess.Popen(
        [sys.executable, "-c", program, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # where the tests run in a shell's background
    )
    assert backend.stalled.wait(60)
    client.send_signal(signal.SIGINT)
    stdout, _ = client.communicate(timeout=60)
    assert client.returncode == 130
    found = json.loads(stdout.splitlines()[-1])
    assert (found["ok"], found["failed"], found["complete"]) == (3, 0, False)
    assert b"Interrupted" in stdout


def test_no_server_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = run("--url", f"http://127.0.0.1:{port}", "--num-requests", "1")
    assert isinstance(result.exception, BenthicError)
    assert "benthic serve" in str(result.exception)


@pytest.mark.parametrize("flags", [("--rate", "0"), ("--concurrency", "0"), ("--output-tokens", "0")])
def test_impossible_loads_are_refused_by_flag(flags: tuple[str, str]) -> None:
    result = run(*flags)
    assert isinstance(result.exception, ConfigError)
    assert flags[0] in str(result.exception)
