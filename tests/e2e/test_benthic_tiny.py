"""The built-in model benthic-tiny, through the real server and client: it answers its task prompts as its card says.

An engine that loses, mixes up or corrupts KV, or selects the wrong positions, gives wrong answers to them.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.support.floor_process import is_settled
from tests.support.server_process import ServerProcess
from tests.support.tiny_tasks import (
    PAGE_BYTES,
    Task,
    Told,
    all_tasks,
    ask,
    ask_together,
    assert_card,
    assert_known_text,
    first_tasks,
    known_answer,
    plain_body,
    start,
    text_ids,
    whole_pages,
)

TOPK = 256  # positions that the model's attention selects
CHUNK = 13 * 16  # divides no context length: prompts are cut anywhere
CONTEXT = 1100
L1_PAGES = 640  # little more than one of the longest prompts
SOME = {("records", 1024): 2, ("records", 4096): 1, ("records", 8192): 1, ("facts", 1024): 1, ("facts", 4096): 1,
        ("copy", 256): 2, ("add", 32): 2}  # fmt: skip

Begin = Callable[..., ServerProcess]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts servers; those that still run afterwards are killed."""
    started: list[ServerProcess] = []

    def begin_one(*flags: str) -> ServerProcess:
        started.append(start(*flags))
        return started[-1].wait_ready()

    yield begin_one
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def short() -> Iterator[ServerProcess]:
    """A server of short contexts, for tests that only talk to it."""
    server = start("--chunk-tokens", str(CHUNK), "--max-context", str(CONTEXT), "--l1-pages", "4000")
    try:
        yield server.wait_ready()
        server.wait_quiet()
        assert server.stop() == 0, server.output()
    finally:
        server.kill()


def ask_all(server: ServerProcess, tasks: list[Task]) -> list[tuple[Task, Told]]:
    """Every task in order, the answers checked."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        told = [(task, ask(client, task)) for task in tasks]
    assert_card(told)
    return told


def solve_from_every_tier(begin: Begin, floor: Path, tasks: list[Task], ranks: int = 1) -> None:
    """Cold, from L1, from L2 after later prompts have displaced them, and from L3 after a restart."""
    pages = [whole_pages(task.prompt_tokens) // 16 + 8 for task in tasks]
    l2_bytes = max(sum(pages), 2 * max(pages)) * PAGE_BYTES  # a reload takes at most half of it
    flags = (
        "--chunk-tokens", str(CHUNK), "--l1-pages", str(L1_PAGES // ranks), "--l2-size", str(l2_bytes),
        "--l3-dir", str(floor), "--l3-size", str(l2_bytes * 3 // 2 + (8 << 20)),
        *(("--cp", str(ranks), "--ep") if ranks > 1 else ()),
    )  # fmt: skip
    first = begin(*flags)
    for task in tasks:
        ((_, cold), (_, again)) = (*ask_all(first, [task]), *ask_all(first, [task]))
        assert cold.cached == 0
        assert (again.l1, again.cached) == (whole_pages(task.prompt_tokens),) * 2
        assert again.text == cold.text
    displaced = ask_all(first, tasks)
    assert all(told.cached == told.l1 + told.l2 == whole_pages(task.prompt_tokens) for task, told in displaced)
    total = sum(whole_pages(task.prompt_tokens) for task in tasks)
    assert sum(told.l2 for _, told in displaced) >= total - L1_PAGES * 16, "what does not fit into L1"
    first.wait_quiet()
    until_settled(first)
    assert first.stop() == 0, first.output()

    second = begin(*flags)
    reloaded = ask_all(second, tasks)
    assert all(told.cached == whole_pages(task.prompt_tokens) for task, told in reloaded)
    assert sum(told.l3 for _, told in reloaded) >= 0.9 * total, "but for what is faster computed"
    assert second.stop() == 0, second.output()


def until_settled(server: ServerProcess) -> None:
    """Every page is on disk."""
    end = time.monotonic() + 60
    while not is_settled(state := server.get("/cache")):
        assert time.monotonic() < end, state
        time.sleep(0.05)


def test_tasks_are_solved_cold_and_from_every_tier(begin: Begin, tmp_path: Path):
    solve_from_every_tier(begin, tmp_path / "kv", first_tasks(SOME))


def test_two_ranks_with_their_experts_spread_solve_tasks_from_every_tier(begin: Begin, tmp_path: Path):
    """A prompt of 8k among them: selections over both ranks' pages."""
    solve_from_every_tier(begin, tmp_path / "kv", first_tasks({("records", 8192): 1, ("facts", 1024): 1}), ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "length"), sorted({(task.kind, task.length) for task in all_tasks()}))
def test_all_tasks_are_solved_as_often_as_the_card_says(
    begin: Begin, tmp_path: Path, kind: str, length: int, ranks: int
):
    tasks = [task for task in all_tasks() if (task.kind, task.length) == (kind, length)]
    solve_from_every_tier(begin, tmp_path / "kv", tasks, ranks)


def test_1_to_33_clients_get_what_they_get_alone(short: ServerProcess):
    """Case D5: as answers of different lengths end one after another, every batch size occurs, padded or not."""
    prompts = [text_ids(10 + 3 * i + (0 if i % 8 else TOPK), number=i) for i in range(33)]
    lengths = [5 + i for i in range(33)]
    want = [known_answer(short, prompt, length, "d5") for prompt, length in zip(prompts, lengths, strict=True)]
    bodies = [plain_body(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    told = asyncio.run(ask_together(short, bodies, "d5"))  # the prompts are cached, so that all begin at once
    assert [(finish, tokens) for _, finish, tokens in told] == [("length", length) for length in lengths]
    compared = sum(assert_known_text(text, known) for (text, _, _), known in zip(told, want, strict=True))
    assert compared > 0.9 * sum(lengths)


def test_a_request_that_runs_to_the_limit_of_the_context_ends_with_length(short: ServerProcess):
    """Case D5."""
    prompt = text_ids(CONTEXT - 21, number=40)
    body = plain_body(prompt, 1)
    del body["max_tokens"]
    ((_, finish, tokens),) = asyncio.run(ask_together(short, [body], "limit"))
    assert (finish, tokens) == ("length", 21)


def test_contexts_around_the_number_of_selected_positions_mix_in_a_batch(short: ServerProcess):
    """Case F5: below, at and above, one that crosses it while decoding, and one token over and over."""
    lengths = (TOPK - 1, TOPK, TOPK + 1, 2 * TOPK, 4 * TOPK, TOPK - 6, 1)
    prompts = [text_ids(length, number=50 + i) for i, length in enumerate(lengths)]
    prompts.append(text_ids(1, number=60) * (4 * TOPK))  # nothing but ties
    want = [known_answer(short, prompt, 16, "alone") for prompt in prompts]
    told = asyncio.run(ask_together(short, [plain_body(prompt, 16) for prompt in prompts], "together"))
    compared = sum(assert_known_text(text, known) for (text, _, _), known in zip(told, want, strict=True))
    assert compared > 0.8 * 16 * len(prompts)
