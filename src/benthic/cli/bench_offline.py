"""`benthic bench offline`: what the engine does without HTTP, in this process.

Two runs over prompts that share nothing, so that the cache helps neither: one that stops at the first token (prefill),
and a full one. Decode is what the full run takes beyond the first one.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benthic.cli.offline import Generator, engine_arguments, open_llm
from benthic.cli.options import with_options
from benthic.cli.workload import token_prompts
from benthic.common.errors import BenthicError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFigures:
    """Tokens and seconds of the two runs."""

    num_requests: int
    prefill_tokens: int  # computed, not cached, in the prefill run
    prefill_s: float
    output_tokens: int  # of the full run
    full_s: float  # prefill of the same size, then decode

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second."""
        return self.prefill_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after each answer's first, over the time beyond the prefill run; None where no such time was left."""
        tokens, seconds = self.output_tokens - self.num_requests, self.full_s - self.prefill_s
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, rates included."""
        rates = {"prefill_tokens_per_s": self.prefill_tokens_per_s, "decode_tokens_per_s": self.decode_tokens_per_s}
        return asdict(self) | rates


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineLoad:
    """What to run."""

    num_requests: int
    input_tokens: int
    output_tokens: int
    vocab_size: int
    seed: int


def register(app: typer.Typer) -> None:
    """Add `offline` to `app`, the group of benchmarks."""
    app.command()(with_options(server=False)(offline))


def offline(
    options: Any,
    num_requests: Annotated[int, typer.Option(help="Prompts a run. E.g. --num-requests 32")] = 16,
    input_tokens: Annotated[int, typer.Option(help="Tokens a prompt. E.g. --input-tokens 1024")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Tokens an answer, at least 2. E.g. --output-tokens 128")] = 32,
    batch: Annotated[
        int | None, typer.Option(help="Requests at once: the same as --max-running. E.g. --batch 8")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Random token ids stay below it. E.g. --vocab-size 500")] = 10000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Measure prefill and decode of the engine in this process.

    Example: benthic bench offline smollm2-135m --num-requests 32 --batch 8
    """
    load = OfflineLoad(
        num_requests=num_requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        vocab_size=vocab_size,
        seed=options.seed or 0,
    )
    check_load(load)
    with open_llm(with_batch(engine_arguments(options), batch)) as llm:
        figures = measure(llm, load, time.perf_counter)
    show(figures, Console())
    if as_json:
        typer.echo(msgspec.json.encode(figures.to_json()).decode())


def check_load(load: OfflineLoad) -> None:
    """Raises ConfigError before any model is loaded."""
    if load.output_tokens < 2:
        raise ConfigError(f"--output-tokens {load.output_tokens}: must be at least 2, the first belongs to the prefill")
    token_prompts(1, load.input_tokens, 0, load.vocab_size, load.seed)
    if load.num_requests < 1:
        raise ConfigError(f"--num-requests {load.num_requests}: must be at least 1")


def with_batch(arguments: dict[str, Any], batch: int | None) -> dict[str, Any]:
    """The engine's arguments with `batch` as its bound. Raises ConfigError where both were given and differ."""
    if batch is None:
        return arguments
    if arguments.get("max_running", batch) != batch:
        raise ConfigError(f"--batch {batch} and --max-running {arguments['max_running']} are the same bound; give one")
    return arguments | {"max_running": batch}


def measure(llm: Generator, load: OfflineLoad, clock: Callable[[], float]) -> OfflineFigures:
    """Warm up with one prompt, then do both runs. Raises BenthicError where answers are shorter than asked."""
    warm_up, first, second = (replace(load, seed=3 * load.seed + step) for step in range(3))
    _run(llm, replace(warm_up, num_requests=1), clock, 2)
    computed, _, prefill_s = _run(llm, first, clock, 1)
    _, output_tokens, full_s = _run(llm, second, clock, load.output_tokens)
    return OfflineFigures(
        num_requests=load.num_requests,
        prefill_tokens=computed,
        prefill_s=prefill_s,
        output_tokens=output_tokens,
        full_s=full_s,
    )


def _run(llm: Generator, load: OfflineLoad, clock: Callable[[], float], max_tokens: int) -> tuple[int, int, float]:
    """Prompt tokens computed, tokens generated, seconds."""
    prompts = token_prompts(load.num_requests, load.input_tokens, 0, load.vocab_size, load.seed)
    start_s = clock()
    answers = llm.generate(prompts, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, progress=True)
    seconds = clock() - start_s
    generated = sum(len(answer.token_ids) for answer in answers)
    if generated != load.num_requests * max_tokens:
        raise BenthicError(
            f"the engine generated {generated} tokens where {load.num_requests} x {max_tokens} were asked for: "
            f"the figures would be wrong; is --max-context too small?"
        )
    return sum(answer.prompt_tokens - answer.cached_tokens for answer in answers), generated, seconds


def show(figures: OfflineFigures, console: Console) -> None:
    """Print the table."""
    table = Table("run", "tokens", "seconds", "tokens/s")
    decode, rate = figures.output_tokens - figures.num_requests, figures.decode_tokens_per_s
    table.add_row(
        "prefill", str(figures.prefill_tokens), f"{figures.prefill_s:.2f}", f"{figures.prefill_tokens_per_s:.1f}"
    )
    decode_s = f"{figures.full_s - figures.prefill_s:.2f}"
    table.add_row("decode", str(decode), decode_s, f"{rate:.1f}" if rate is not None else "too short to tell")
    console.print(table)
