"""What clients get wrong: always OpenAI's error shape, with the field's name and the limit, and short."""

import socket
import time
from typing import Any

import httpx
import pytest

from tests.support.fake_server_process import FakeServer

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
OK = {"prompt": "hi", "max_tokens": 1}


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:500]
    assert len(answer.content) < 4096
    assert "Traceback" not in answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture(autouse=True)
def _a_normal_request_works_afterwards(http: httpx.Client) -> Any:
    yield
    assert http.post("/v1/completions", json=OK).status_code == 200
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe{",
        b"[" * 100_000,
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_broken_bodies(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body))


def test_no_content_type_is_fine(http: httpx.Client) -> None:
    assert http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}').status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"top_p": 2}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 1e30}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"return_hidden_states": True, "max_tokens": 2000, "n": 128, "prompt": ["a", "b"]}, "return_hidden_states"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refused(http.post("/v1/completions", json=OK | fields))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "hat": 1}]}, "messages[0].hat"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "x" * 1000, "content": 5}] * 5000}, "messages[0].role"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"x" * 100_000: 1}, None),
    ],
)
def test_wrong_chat_fields_are_named(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields
    error = refused(http.post("/v1/chat/completions", json=body))
    assert param is None or error["param"] == param


def test_nulls_and_defaults_of_unsupported_fields_pass(http: httpx.Client) -> None:
    body = OK | {"suffix": None, "response_format": {"type": "text"}, "best_of": None}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_unknown_model(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json=OK | {"model": "gpt-5"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "tiny" in error["message"]


@pytest.mark.parametrize(("length", "status"), [(2047, 200), (2048, 400), (2049, 400)])
def test_prompts_around_the_context(http: httpx.Client, length: int, status: int) -> None:
    answer = http.post("/v1/completions", json={"prompt": [97] * length})
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 1
    else:
        message = refused(answer)["message"]
        assert str(length) in message
        assert "2048" in message


def test_prompt_and_max_tokens_over_the_context(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": "a" * 2000, "max_tokens": 49}))
    assert error["code"] == "context_length_exceeded"
    for number in ("2000", "49", "2049", "2048"):
        assert number in error["message"]


def test_a_body_above_the_bound(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", content=b"x" * (50 << 20)), 413)
    assert str(32 << 20) in error["message"]


def test_a_body_above_the_bound_without_a_declared_length(http: httpx.Client) -> None:
    refused(http.post("/v1/completions", content=(b"x" * (1 << 20) for _ in range(40))), 413)


def test_unknown_path_and_method(http: httpx.Client) -> None:
    refused(http.get("/v1/nothing"), 404)
    refused(http.get("/v1/completions"), 405)


def test_client_that_leaves_in_the_middle_of_its_body(server: FakeServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.05)
