"""Figures of the two offline runs, from a generator and a clock that the test controls."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benthic.cli import bench, bench_offline
from benthic.cli.bench_offline import OfflineFigures, OfflineLoad, measure, with_batch
from benthic.cli.offline import Generation, engine_arguments
from benthic.common.errors import BenthicError, ConfigError
from benthic.config import Options

LOAD = OfflineLoad(num_requests=4, input_tokens=100, output_tokens=11, vocab_size=500, seed=7)


@dataclass
class Answer:
    """One answer of the generator below."""

    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int = 0
    text: str = ""
    finish_reason: str = "length"


class Machine:
    """Generates at 1000 prompt tokens and 10 output tokens a second, on its own clock."""

    def __init__(self, most_tokens: int = 1000) -> None:
        self.now_s, self.most_tokens = 0.0, most_tokens
        self.calls: list[list[list[int]]] = []

    def generate(self, prompts: Any, **sampling: Any) -> Sequence[Generation]:
        self.calls.append(prompts)
        tokens = min(sampling["max_tokens"], self.most_tokens)
        self.now_s += sum(len(p) for p in prompts) / 1000 + len(prompts) * (tokens - 1) / 10
        return [Answer([1] * tokens, len(p)) for p in prompts]


def test_prefill_and_decode_are_told_apart() -> None:
    machine = Machine()
    figures = measure(machine, LOAD, lambda: machine.now_s)
    assert figures.prefill_tokens == 400
    assert figures.prefill_tokens_per_s == pytest.approx(1000)
    assert figures.decode_tokens_per_s == pytest.approx(10)
    assert figures.to_json()["output_tokens"] == 44


def test_no_run_s_prompts_were_seen_before() -> None:
    machine = Machine()
    measure(machine, LOAD, lambda: machine.now_s)
    prompts = [tuple(prompt) for call in machine.calls for prompt in call]
    assert len(prompts) == 9
    assert len(set(prompts)) == 9


def test_answers_cut_short_give_no_figures() -> None:
    machine = Machine(most_tokens=5)
    with pytest.raises(BenthicError, match="generated 20 tokens where 4 x 11"):
        measure(machine, LOAD, lambda: machine.now_s)


def test_a_decode_too_short_to_measure_is_said_so() -> None:
    figures = OfflineFigures(num_requests=1, prefill_tokens=9, prefill_s=2.0, output_tokens=2, full_s=1.9)
    assert figures.decode_tokens_per_s is None
    console = Console(width=100, file=io.StringIO())
    with console.capture() as capture:
        bench_offline.show(figures, console)
    assert "too short to tell" in capture.get()


def test_batch_is_max_running() -> None:
    assert with_batch({"model": "m"}, 8) == {"model": "m", "max_running": 8}
    assert with_batch({"max_running": 8}, None) == {"max_running": 8}
    with pytest.raises(ConfigError, match="--batch 8 and --max-running 4"):
        with_batch({"max_running": 4}, 8)


def test_the_engine_gets_what_was_given_and_no_server_options() -> None:
    options = Options(page_size=16, seed=0, host="0.0.0.0", api_key="s3cret")
    assert engine_arguments(options) == {"model": "smollm2-135m", "page_size": 16, "seed": 0}


@pytest.mark.parametrize(
    "flags",
    [
        ("--output-tokens", "1"),
        ("--num-requests", "0"),
        ("--input-tokens", "0"),
        ("--vocab-size", "1"),
        ("--cp", "2"),
    ],
)
def test_impossible_loads_are_refused_before_a_model_is_loaded(flags: tuple[str, str]) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    bench.register(app)
    result = CliRunner().invoke(app, ["bench", "offline", "no/such-model", *flags])
    assert isinstance(result.exception, ConfigError)
    assert flags[0] in str(result.exception)
