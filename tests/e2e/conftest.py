"""Servers for the end-to-end tests: one of the default model for those that only talk to it, and tiny ones with all
tiers, to be damaged, killed and started again."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.faulty_engine import Rules
from tests.support.floor_process import FILLED_SLOTS, FloorServer, Prompt, Right, floor_flags
from tests.support.server_process import ServerProcess
from tests.support.tiny_checkpoint import write_checkpoint

FLAGS = ("smollm2-135m", "--device", "cpu", "--dtype", "float32", "--page-size", "16", "--l1-size", "600MiB",
         "--max-running", "16", "--chunk-tokens", "256")  # fmt: skip
NUM_PROMPTS, PAGES = 6, 12  # in the `filled` floor


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's folder."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def right(tiny: Path) -> Iterator[Right]:
    """The tiny model's right answers."""
    answers = Right(tiny)
    try:
        answers.server.wait_ready()
        yield answers
        assert answers.server.stop() == 0, answers.server.output()
    finally:
        answers.server.kill()


@pytest.fixture
def start(tiny: Path) -> Iterator[Callable[..., FloorServer]]:
    """Starts tiny servers that are ready; what still runs afterwards is killed."""
    started: list[FloorServer] = []

    def begin(*flags: str, **options: Any) -> FloorServer:
        started.append(FloorServer(tiny, *flags, **options))
        return started[-1].wait_ready()

    yield begin
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def known(right: Right) -> list[Prompt]:
    """What `filled` holds."""
    return right.prompts(NUM_PROMPTS, PAGES * 16 + 5, seed=11)


@pytest.fixture(scope="session")
def filled(tiny: Path, known: list[Prompt], right: Right, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A floor of `FILLED_SLOTS` that holds all pages of the `known` prompts; tests work on copies."""
    floor = tmp_path_factory.mktemp("filled") / "kv"
    server = FloorServer(tiny, *floor_flags(floor, l3_slots=FILLED_SLOTS))
    try:
        server.wait_ready()
        for prompt in known:
            assert server.ask(prompt).text == right(prompt)
        assert server.stop() == 0, server.output()
    finally:
        server.kill()
    return floor


@pytest.fixture
def floor(filled: Path, tmp_path: Path) -> Path:
    """A copy of `filled`."""
    shutil.copytree(filled, tmp_path / "kv")
    return tmp_path / "kv"


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    """The faults of a test's disk: none yet."""
    return Rules(tmp_path / "rules.json")
