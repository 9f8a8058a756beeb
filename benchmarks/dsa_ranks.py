"""`benchmarks.dsa --cp N`: the same parts on one rank and on N, and whether benthic-tiny answers alike on both."""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.dsa_parts import (
    Figures,
    Model,
    Work,
    measure_decode,
    measure_prefill,
    measure_tiers,
    speed_engine,
    tiers_engine,
)
from benchmarks.engine import BenchEngine
from benchmarks.ranks import RankProcesses, device_of, lead_or_follow, with_experts_spread
from benthic.models.registry import open_checkpoint
from benthic.parallel.launch import Ranks
from benthic.text.text_model import CheckpointText
from benthic.weights.locate import locate
from benthic.weights.tokenizer import load_tokenizer

EQUAL = "equal"  # the part that compares answers
TINY = "benthic-tiny"
LONGEST = {"cpu": 1024, "cuda": 8192}  # nominal tokens of the questions whose answers are compared
QUESTIONS = {"cpu": 8, "cuda": 60}


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure on every number of ranks."""

    raw: dict[str, Any]
    device: str
    options: dict[str, object]
    work: Work
    spread: bool  # experts over the ranks
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of benthic-tiny's and how long its answer is, in tokens."""

    prompt: list[int]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What rank 0 has found; `failed`: why no more."""

    rows: list[tuple[str, str]]
    values: dict[str, object]
    failed: str


def compare_ranks(job: Job, num_ranks: int, figures: Figures, folder: Path) -> None:
    """One rank, then `num_ranks`; rows and values of both, ratios of the second."""
    if job.device == "cuda" and num_ranks > torch.cuda.device_count():
        have = f"{torch.cuda.device_count()} GPUs for {num_ranks} ranks"
        figures.rows.append(("WARNING", f"{have}: over gloo through host memory; for correctness, not for speed"))
    answers: dict[int, list[list[int]]] = {}
    for count in (1, num_ranks):
        with RankProcesses(count, job.device) as processes:
            if {"prefill", "decode"} & set(job.parts):
                _add(processes.run(speed_part, job)[0], count, figures)
            if "tiers" in job.parts:
                own = folder / f"cp{count}"
                own.mkdir(exist_ok=True)
                _add(processes.run(tiers_part, job, own)[0], count, figures)
            if EQUAL in job.parts:
                told = processes.run(answers_part, job, questions(job.device))[0]
                assert told is not None
                answers[count] = told
    if EQUAL in job.parts:
        _compare_answers(answers[1], answers[num_ranks], num_ranks, figures)


def _add(measured: Measured | None, num_ranks: int, figures: Figures) -> None:
    assert measured is not None, "rank 0 tells what it has found"
    name = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    figures.rows += [(f"{label}, {name}", text) for label, text in measured.rows]
    for key, value in measured.values.items():
        figures.values[f"cp{num_ranks}_{key}"] = value
        one = figures.values.get(f"cp1_{key}")
        if num_ranks > 1 and key.endswith("_per_s") and isinstance(value, float) and isinstance(one, float):
            figures.values[f"cp{num_ranks}_{key}_ratio"] = value / one
            figures.rows.append((f"{key}, {num_ranks} ranks to one", f"{value / one:.2f}"))
    if measured.failed:
        figures.wrong.append(f"{name}: {measured.failed}")


def _compare_answers(one: list[list[int]], many: list[list[int]], num_ranks: int, figures: Figures) -> None:
    equal = sum(a == b for a, b in zip(one, many, strict=True))
    figures.values |= {"equal_answers": equal, "answers": len(one)}
    figures.rows.append((f"{TINY}, {num_ranks} ranks", f"{equal} of {len(one)} answers are one rank's"))
    if equal < len(one):
        figures.wrong.append(
            f"{TINY}: {len(one) - equal} of {len(one)} answers of {num_ranks} ranks are not one rank's"
        )


# --- on each rank -----------------------------------------------------------------------------------------------------


def speed_part(ranks: Ranks, job: Job) -> Measured | None:
    """Prefill and decode; on rank 0."""
    model = _model(ranks, job)

    def act(engine: BenchEngine, figures: Figures) -> None:
        if "prefill" in job.parts:
            measure_prefill(engine, model, job.work, figures)
        if "decode" in job.parts:
            measure_decode(engine, model, job.work, figures)

    return _measured(speed_engine(model, job.work), model.ranks, act)


def tiers_part(ranks: Ranks, job: Job, folder: Path) -> Measured | None:
    """First tokens by tier; on rank 0."""
    model = _model(ranks, job)
    engine = tiers_engine(model, job.work, folder)
    return _measured(
        engine, model.ranks, lambda engine, figures: measure_tiers(engine, model, job.work, figures, folder)
    )


def answers_part(ranks: Ranks, job: Job, asked: list[Question]) -> list[list[int]] | None:
    """benthic-tiny's greedy tokens, each question alone and then all at once; on rank 0."""
    ranks = with_experts_spread(ranks, job.spread)
    longest = max(len(q.prompt) + q.answer_tokens for q in asked)
    engine = BenchEngine(
        open_checkpoint(locate(TINY)), ranks, device=str(device_of(ranks, job.device).type), page_size=16,
        dtype=job.options["dtype"], max_context=longest + 64, chunk_tokens=512, max_running=8,
        l1_pages=(len(asked) + 2) * (longest + 64) // 16 // ranks.layout.cp_size + len(asked),
    )  # fmt: skip

    def act(engine: BenchEngine) -> list[list[int]]:
        alone = [engine.run([q.prompt], q.answer_tokens, salt="alone").tokens[0] for q in asked]
        together = engine.run([q.prompt for q in asked], min(q.answer_tokens for q in asked), salt="together")
        return alone + together.tokens

    return lead_or_follow(engine, ranks, act)


def _model(ranks: Ranks, job: Job) -> Model:
    ranks = with_experts_spread(ranks, job.spread)
    return Model(job.raw, device_of(ranks, job.device), job.options, ranks)


def _measured(engine: BenchEngine, ranks: Ranks, act: Callable[[BenchEngine, Figures], None]) -> Measured | None:
    figures = Figures(with_aims=False)

    def caught(engine: BenchEngine) -> Measured:
        failed = ""
        try:
            act(engine, figures)
        except Exception:  # noqa: BLE001  # what was measured before it counts, and the others wait for the end
            failed = traceback.format_exc()
        return Measured(figures.rows, figures.values, failed)

    return lead_or_follow(engine, ranks, caught)


# --- benthic-tiny's questions -----------------------------------------------------------------------------------------


def questions(device: str) -> list[Question]:
    """Some of every kind, up to a length."""
    source = locate(TINY)
    text = CheckpointText(load_tokenizer(source))
    by_kind: dict[str, list[Question]] = {}
    for line in (source.path / "eval.jsonl").read_text().splitlines():
        task = json.loads(line)
        if task["context_length"] <= LONGEST[device]:
            prompt = text.encode(text.render_chat(task["messages"], {}), add_special_tokens=False)
            size = len(text.encode(task["answer"], add_special_tokens=False)) + 1  # and its end
            by_kind.setdefault(task["task"], []).append(Question(prompt, size))
    each = max(1, QUESTIONS[device] // len(by_kind))
    return [question for asked in by_kind.values() for question in asked[:: max(1, len(asked) // each)][:each]]
