"""One server over the fake engine for all tests that don't need their own."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.fake_server_process import FakeServer, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with running(tmp_path_factory.mktemp("server"), engine=["--token-delay", "0.001"]) as process:
        yield process.wait_ready()


@pytest.fixture(scope="session")
def http(server: FakeServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="session")
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with server.openai() as one:
        yield one
