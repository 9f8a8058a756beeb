"""The task prompts that come with benthic-tiny, a server of it, and answers that can be compared."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import openai

from benthic.weights.locate import locate
from benthic.weights.tokenizer import load_tokenizer
from tests.support.server_process import ServerProcess

MODEL = "benthic-tiny"
PAGE = 16  # tokens
FLAGS = (MODEL, "--device", "cpu", "--dtype", "float32", "--page-size", str(PAGE), "--max-running", "33")
PAGE_BYTES = 8 * PAGE * (128 + 32 + 64) * 4  # of 8 layers: a latent, its rope part and an index key, float32
LONGEST_ANSWER = 160  # tokens
NOT_COPIED = 1  # of the 30 texts to be copied: the model card's 29
LEAST_GAP = 1e-3  # between the two best tokens: float32 rounding does not decide above it


@dataclass(frozen=True)
class Task:
    """One line of eval.jsonl."""

    id: str
    kind: str  # records, facts, copy, add
    length: int  # tokens of context, nominal
    prompt_tokens: int
    question: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


@dataclass(frozen=True)
class Told:
    """What a client got; `l1` … `l3` are tokens of the prompt that were found there."""

    text: str
    finish: str
    prompt_tokens: int
    l1: int
    l2: int
    l3: int

    @property
    def cached(self) -> int:
        return self.l1 + self.l2 + self.l3

    def solves(self, task: Task) -> bool:
        """The whole answer and its end token."""
        return (self.text, self.finish) == (task.answer, "stop")


@cache
def all_tasks() -> tuple[Task, ...]:
    """The 200 prompts, in the file's order."""
    lines = (locate(MODEL).path / "eval.jsonl").read_text().splitlines()
    return tuple(_task(json.loads(line)) for line in lines)


def _task(line: Mapping[str, Any]) -> Task:
    (message,) = line["messages"]
    return Task(
        line["id"], line["task"], line["context_length"], line["prompt_tokens"], message["content"], line["answer"]
    )


def first_tasks(counts: Mapping[tuple[str, int], int]) -> list[Task]:
    """So many of each kind and length."""
    left = Counter(counts)
    chosen = []
    for task in all_tasks():
        if left[task.kind, task.length]:
            left[task.kind, task.length] -= 1
            chosen.append(task)
    assert not left.total(), f"there are not so many tasks: {left}"
    return chosen


def whole_pages(prompt_tokens: int) -> int:
    """Tokens of a prompt that the cache can have: whole pages, but none that would end with the prompt."""
    return (prompt_tokens - 1) // PAGE * PAGE


def ask(client: openai.OpenAI, task: Task) -> Told:
    """The task through the chat endpoint, greedy. A salt: prompts that begin alike find nothing of one another."""
    answer = client.chat.completions.create(
        model=MODEL, messages=task.messages, temperature=0, max_tokens=LONGEST_ANSWER,
        extra_body={"cache_salt": task.id},
    )  # fmt: skip
    tiers = answer.usage.model_extra["cached_tokens_by_tier"]
    assert answer.usage.prompt_tokens == task.prompt_tokens, task.id
    choice = answer.choices[0]
    return Told(choice.message.content, choice.finish_reason, task.prompt_tokens, tiers["l1"], tiers["l2"], tiers["l3"])


def assert_card(told: Iterable[tuple[Task, Told]]) -> None:
    """As many right answers as the model card says: all, but for one of the texts to be copied."""
    wrong = [(task, got) for task, got in told if not got.solves(task)]
    other = [f"{task.id}: {got.text!r} instead of {task.answer!r}" for task, got in wrong if task.kind != "copy"]
    assert not other, other
    assert len(wrong) <= NOT_COPIED, [task.id for task, _ in wrong]


def start(*flags: str) -> ServerProcess:
    """A server of the model; wait for it, and kill it at the end."""
    return ServerProcess(*FLAGS, *flags)


# --- prompts of any length -------------------------------------------------------------------------------------------


@cache
def _running_text() -> tuple[int, ...]:
    """Token ids of the facts prompts' text, one after another."""
    tokenizer = load_tokenizer(locate(MODEL))
    texts = [task.question for task in all_tasks() if (task.kind, task.length) == ("facts", 4096)]
    return tuple(i for text in texts for i in tokenizer.encode(text, add_special_tokens=False))


def text_ids(length: int, number: int) -> list[int]:
    """`length` token ids of running text; prompts of different numbers begin differently."""
    ids = _running_text()
    start_at = 97 * number
    assert start_at + length <= len(ids)
    return list(ids[start_at : start_at + length])


@dataclass(frozen=True)
class Known:
    """A greedy answer with what decided it."""

    tokens: tuple[str, ...]
    gaps: tuple[float, ...]  # between the two best logits, one a token


def known_answer(server: ServerProcess, prompt: Sequence[int], max_tokens: int, salt: str) -> Known:
    """The answer when the request is alone."""
    body = {"model": MODEL, "logprobs": 2, "cache_salt": salt} | plain_body(prompt, max_tokens)
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    logprobs = response.json()["choices"][0]["logprobs"]
    best = [sorted(tops.values(), reverse=True) for tops in logprobs["top_logprobs"]]
    return Known(tuple(logprobs["tokens"]), tuple(first - second for first, second in best))


def plain_body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A greedy completion of exactly so many tokens, end tokens shown as text."""
    return {
        "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "skip_special_tokens": False,
    }  # fmt: skip


async def ask_together(
    server: ServerProcess, bodies: Iterable[Mapping[str, Any]], salt: str
) -> list[tuple[str, str, int]]:
    """(text, finish reason, tokens) of completions that are sent at the same time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        posts = [client.post("/v1/completions", json={"model": MODEL, "cache_salt": salt, **body}) for body in bodies]
        answers = await asyncio.gather(*posts)
    told = []
    for answer in answers:
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        told.append((choice["text"], choice["finish_reason"], answer.json()["usage"]["completion_tokens"]))
    return told


def assert_known_text(text: str, want: Known) -> int:
    """Equal up to the first token that rounding may decide; how many tokens were compared."""
    decided = next((i for i, gap in enumerate(want.gaps) if gap < LEAST_GAP), len(want.gaps))
    start_of = "".join(want.tokens[:decided])
    assert text == start_of if decided == len(want.tokens) else text.startswith(start_of), (text, want)
    return decided
