"""How a server starts, refuses, drains and dies: real processes, real signals, nothing left behind."""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.fake_server_process import FakeServer, alive, running, wait_for

SLOW = ("--token-delay", "0.02")
LONG = {"prompt": "ab", "max_tokens": 2000, "temperature": 0}


class Stream:
    """A stream that a thread reads, and what it got."""

    def __init__(self, server: FakeServer, **fields: Any) -> None:
        self.events: list[str] = []
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(server.url, LONG | {"stream": True} | fields))
        self._thread.start()
        wait_for(lambda: len(self.events) > 3)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.Client(timeout=60) as http, http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                self.events.extend(line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            self.failed = error

    def end(self) -> list[str]:
        self._thread.join(30)
        assert self.failed is None
        return self.events


def assert_ended_with_error(events: list[str], words: str) -> None:
    last = json.loads(events[-1].removeprefix("data: "))
    assert words in last["error"]["message"]
    assert "data: [DONE]" not in events
    assert not any(json.loads(event[6:]).get("choices", [{}])[0].get("finish_reason") for event in events[:-1])


def assert_nothing_left(server: FakeServer, pids: list[int]) -> None:
    assert not any(alive(pid) for pid in pids)
    assert server.leftovers() == []


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[FakeServer]:
    with running(tmp_path, ["--grace-s", "0.5"], SLOW) as server:
        yield server.wait_ready()


def test_start_prints_the_table_the_address_and_a_line_to_try(tmp_path: Path) -> None:
    with running(tmp_path, ["--served-model-name", "it's"]) as server:
        server.wait_ready()
        with server.http() as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "it's"
        pids = server.engine_pids()
        assert len(pids) == 1
        assert server.end() == 0
        assert_nothing_left(server, pids)
    for words in ("page_size", "as given", "it's is ready", f"curl {server.url}/v1/chat/completions", "weights: 0 %"):
        assert words in server.text


def test_while_loading_only_health_answers(tmp_path: Path) -> None:
    with running(tmp_path, engine=["--load-s", "60"]) as server, server.http() as http:
        assert http.get("/health").json() == {"status": "loading"}
        for path in ("/ready", "/v1/models", "/cache"):
            assert http.get(path).status_code == 503
        answer = http.post("/v1/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        wait_for(server.engine_pids)
        pids = server.engine_pids()
        assert server.end() == 0
        assert_nothing_left(server, pids)


def test_engine_that_refuses_to_start(tmp_path: Path) -> None:
    with running(tmp_path, engine=["--refuse", "not enough memory: need 8 GiB, have 2 GiB"]) as server:
        assert server.wait() == 1
        assert "benthic: not enough memory: need 8 GiB, have 2 GiB" in server.text
        assert "Traceback" not in server.text
        assert server.leftovers() == []


def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    with running(tmp_path, ["--grace-s", "20"], SLOW) as server:
        server.wait_ready()
        stream = Stream(server, max_tokens=40)
        server.child.send_signal(signal.SIGTERM)
        with server.http() as http:
            wait_for(lambda: http.get("/ready").status_code == 503)
            assert http.get("/health").json() == {"status": "stopping"}
            refused = http.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert stream.end()[-1] == "data: [DONE]"
        assert server.wait() == 0
        assert server.leftovers() == []


def test_grace_over_cuts_streams_off_with_an_error(slow: FakeServer) -> None:
    stream, pids = Stream(slow), slow.engine_pids()
    assert slow.end(signal.SIGINT) == 0
    assert_ended_with_error(stream.end(), "shutting down")
    assert_nothing_left(slow, pids)


def test_engine_that_dies_while_the_server_drains(tmp_path: Path) -> None:
    with running(tmp_path, ["--grace-s", "20"], SLOW) as server, server.http() as http:
        server.wait_ready()
        stream, pids = Stream(server), server.engine_pids()
        server.child.send_signal(signal.SIGTERM)
        wait_for(lambda: http.get("/ready").status_code == 503)
        os.kill(pids[0], signal.SIGKILL)
        assert_ended_with_error(stream.end(), "the engine process ended")
        assert server.wait() == 1
        assert_nothing_left(server, pids)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, ["--grace-s", "60"], SLOW) as server:
        server.wait_ready()
        Stream(server, max_tokens=30)
        pids = server.engine_pids()
        with contextlib.suppress(httpx.HTTPError), server.http() as http:
            http.get("/health")
        os.kill(pids[0], signal.SIGSTOP)  # so that the drain can't end by itself
        server.child.send_signal(signal.SIGTERM)
        with server.http() as http:
            wait_for(lambda: http.get("/ready").status_code == 503)
        assert server.end() == 128 + signal.SIGTERM
        wait_for(lambda: not any(alive(pid) for pid in pids))
        assert server.leftovers() == []


def test_engine_killed_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    with running(tmp_path, engine=[*SLOW, "--die-after", "20"]) as server:
        server.wait_ready()
        with server.openai() as client, pytest.raises(openai.APIError, match="SIGKILL"):
            list(client.completions.create(model="tiny", stream=True, **LONG))  # type: ignore[call-overload]
        assert server.wait() == 1
        assert "the engine process ended unexpectedly (killed by SIGKILL)" in server.text
        assert "Traceback" not in server.text
        assert server.leftovers() == []


def test_engine_that_fails_says_why_to_terminal_and_clients(tmp_path: Path) -> None:
    with running(tmp_path, engine=[*SLOW, "--fail-after", "20"]) as server:
        server.wait_ready()
        stream = Stream(server)
        assert_ended_with_error(stream.end(), "on fire")
        assert server.wait() == 1
        assert "benthic: the engine failed: the device is on fire" in server.text


@pytest.mark.parametrize("engine", [("--silent-after", "2"), ()])
def test_engine_that_gives_no_sign_of_life(tmp_path: Path, engine: tuple[str, ...]) -> None:
    with running(tmp_path, ["--beat-s", "1"], [*SLOW, *engine]) as server:
        server.wait_ready()
        stream, pids = Stream(server), server.engine_pids()
        if not engine:
            os.kill(pids[0], signal.SIGSTOP)
        assert_ended_with_error(stream.end(), "no sign of life")
        assert server.wait() == 1
        assert "no sign of life" in server.text
        assert_nothing_left(server, pids)


def test_a_killed_server_takes_its_engine_along(slow: FakeServer) -> None:
    pids = slow.engine_pids()
    slow.child.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert slow.child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_frees_its_request(slow: FakeServer, streaming: bool) -> None:
    def running_now(http: httpx.Client) -> int:
        return int(http.get("/cache").json()["requests"]["running"])

    host, port = slow.url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": streaming}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with slow.http() as http:
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(head + body)
            wait_for(lambda: running_now(http) == 1)
        wait_for(lambda: running_now(http) == 0)


def test_beyond_the_queue_429(tmp_path: Path) -> None:
    with running(tmp_path, ["--max-queue", "2"], [*SLOW, "--max-running", "1"]) as server, server.http() as http:
        server.wait_ready()
        impossible = http.post("/v1/completions", json=LONG | {"n": 4})
        assert (impossible.status_code, impossible.json()["error"]["param"]) == (400, "n")
        streams = [Stream(server, max_tokens=40, n=3)]
        refused = http.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in refused.headers
        assert all(stream.end()[-1] == "data: [DONE]" for stream in streams)
        assert http.post("/v1/completions", json=LONG | {"max_tokens": 1}).status_code == 200


def test_api_key(tmp_path: Path) -> None:
    with running(tmp_path, ["--api-key", "s3cret"]) as server:
        server.wait_ready()
        with server.openai(key="s3cret") as right, server.openai(key="s3cres") as wrong, server.http() as http:
            assert right.completions.create(model="tiny", prompt="a", max_tokens=1).choices[0].text == "a"
            with pytest.raises(openai.AuthenticationError):
                wrong.completions.create(model="tiny", prompt="a", max_tokens=1)
            assert http.post("/v1/completions", json=LONG).json()["error"]["code"] == "invalid_api_key"
            assert [http.get(path).status_code for path in ("/health", "/metrics", "/cache")] == [200, 200, 401]
        assert server.end() == 0
        assert "s3cret" not in server.text


def test_start_token_makes_an_empty_prompt_valid(tmp_path: Path) -> None:
    with running(tmp_path, ["--start-token"]) as server, server.http() as http:
        server.wait_ready()
        for prompt in ("", [""]):
            usage = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()["usage"]
            assert usage["prompt_tokens"] == 1
        assert http.post("/v1/completions", json={"prompt": []}).status_code == 400


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "203.0.113.77", "--port", "8000"], "does not have that address"),
        (["--host", "no.such.host.invalid", "--port", "8000"], "has no address"),
        (["--page-size", "7"], "power of two"),
    ],
)
def test_refused_before_anything_starts(tmp_path: Path, flags: list[str], words: str) -> None:
    with running(tmp_path, flags) as server:
        assert server.wait() == 1
        assert words in server.text
        assert len(server.text.strip().splitlines()) == 1
        assert server.leftovers() == []


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(tmp_path, ["--port", str(port)]) as server:
            assert server.wait() == 1
            assert f"port {port}: the port is in use" in server.text
            assert server.engine_pids() == []
            assert server.leftovers() == []
