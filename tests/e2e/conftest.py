"""One server for the end-to-end tests that only talk to it: the default model in float32, small pages."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.server_process import ServerProcess

FLAGS = ("smollm2-135m", "--device", "cpu", "--dtype", "float32", "--page-size", "16", "--l1-size", "600MiB",
         "--max-running", "16", "--chunk-tokens", "256")  # fmt: skip


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess(*FLAGS)
    try:
        yield process.wait_ready()
        process.wait_quiet()
        assert process.stop() == 0, process.output()
    finally:
        process.kill()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=300) as c:
        yield c
