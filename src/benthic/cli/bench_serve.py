"""`benthic bench serve`: a load generator for any OpenAI-compatible server.

Progress goes to stderr; the tables, and with `--json` one object on the last line, to stdout. Ctrl-C ends the run and
shows what was gathered until then.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benthic.cli.bench_stats import LoadSummary, RequestRecord, counts_table, latency_table, summarize
from benthic.cli.workload import arrivals, text_prompts, token_prompts
from benthic.common.errors import ConfigError

_INTERRUPTED = 130  # the shell's exit code for SIGINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Where to send what, and how fast."""

    url: str
    model: str | None  # None: the first that the server lists
    api_key: str | None
    timeout_s: float
    path: str
    bodies: Sequence[dict[str, Any]]  # one a request, without the model
    send_at_s: Sequence[float]  # after the start, one a request, rising
    concurrency: int | None  # requests in flight at most


def register(app: typer.Typer) -> None:
    """Add `serve` to `app`, the group of benchmarks."""
    app.command()(serve)


def serve(
    url: Annotated[str, typer.Option(help="Server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that /v1/models lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="BENTHIC_API_KEY", help="Bearer token.")] = None,
    num_requests: Annotated[int, typer.Option(help="E.g. --num-requests 1000")] = 100,
    concurrency: Annotated[
        int | None, typer.Option(help="In flight at most. Default: 8; no bound with --rate.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, arriving as a Poisson process.")] = None,
    input_tokens: Annotated[int, typer.Option(help="Tokens a prompt (words with --text or --chat).")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens an answer.")] = 64,
    shared_prefix_tokens: Annotated[int, typer.Option(help="How many of --input-tokens all prompts share.")] = 0,
    vocab_size: Annotated[int, typer.Option(help="Random token ids stay below it.")] = 10000,
    text: Annotated[bool, typer.Option("--text", help="Prompts of English words, not token ids.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions; implies --text.")] = False,
    ignore_eos: Annotated[
        bool, typer.Option(help="Answers run to full length. Off for servers that refuse it.")
    ] = True,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte after which a request has failed.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Load an OpenAI-compatible server and show throughput and latencies.

    Exit code 1: no request succeeded.

    Example: benthic bench serve --num-requests 200 --rate 4 --input-tokens 2048 --shared-prefix-tokens 1024
    """
    check_pace(concurrency, rate, output_tokens)
    prompts: Sequence[str | list[int]]
    if text or chat:
        prompts = text_prompts(num_requests, input_tokens, shared_prefix_tokens, seed)
    else:
        prompts = token_prompts(num_requests, input_tokens, shared_prefix_tokens, vocab_size, seed)
    load = Load(
        url=url.rstrip("/").removesuffix("/v1"),
        model=model,
        api_key=api_key,
        timeout_s=timeout,
        path="/v1/chat/completions" if chat else "/v1/completions",
        bodies=[request_body(prompt, chat, output_tokens, temperature, ignore_eos) for prompt in prompts],
        send_at_s=list(arrivals(num_requests, rate, seed)),
        concurrency=concurrency if concurrency or rate else 8,
    )
    records, complete = gather(load, Console(stderr=True))
    report(summarize(records), Console(), as_json, complete)
    if not complete:
        raise typer.Exit(_INTERRUPTED)
    raise typer.Exit(int(all(record.error is not None for record in records)))


def check_pace(concurrency: int | None, rate: float | None, output_tokens: int) -> None:
    """Raises ConfigError for a load that can't be made."""
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"--concurrency {concurrency}: must be at least 1")
    if rate is not None and not rate > 0:
        raise ConfigError(f"--rate {rate:g}: must be above 0; leave it out to send as fast as --concurrency allows")
    if output_tokens < 1:
        raise ConfigError(f"--output-tokens {output_tokens}: must be at least 1")


def request_body(
    prompt: str | list[int], chat: bool, output_tokens: int, temperature: float, ignore_eos: bool
) -> dict[str, Any]:
    """The JSON of one streaming request, without the model."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {"max_tokens": output_tokens, "temperature": temperature}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | ({"ignore_eos": True} if ignore_eos else {})


def gather(load: Load, console: Console) -> tuple[list[RequestRecord], bool]:
    """Run `load` under a progress bar on `console`; the records, and whether it ran to its end (no Ctrl-C).

    Raises BenthicError where the server can't be reached at all.
    """
    records: list[RequestRecord] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=len(load.bodies))

        def done(record: RequestRecord) -> None:
            records.append(record)
            progress.advance(task)

        try:
            asyncio.run(run_load(load, done))
        except KeyboardInterrupt:
            return records, False
    return records, True


async def run_load(load: Load, done: Callable[[RequestRecord], None]) -> None:
    """Send every request at its time, and hand each record to `done` as it ends."""
    from benthic.cli.bench_client import first_model, open_client, send  # httpx costs every other command 0.1 s

    async with open_client(load.url, load.api_key, load.timeout_s) as client:
        model = load.model or await first_model(client)
        slots = asyncio.Semaphore(load.concurrency or len(load.bodies))
        start_s = asyncio.get_running_loop().time()

        async def one(body: dict[str, Any]) -> None:
            try:
                done(await send(client, load.path, {"model": model, **body}))
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            for body, at_s in zip(load.bodies, load.send_at_s, strict=True):
                await asyncio.sleep(max(0.0, start_s + at_s - asyncio.get_running_loop().time()))
                await slots.acquire()
                tasks.create_task(one(body))


def report(summary: LoadSummary, console: Console, as_json: bool, complete: bool = True) -> None:
    """Print the tables and, where asked for, the JSON line."""
    for table in (counts_table(summary), latency_table(summary)):
        console.print(table)
    if not complete:
        console.print("Interrupted: the figures cover the requests that had ended.")
    if as_json:
        typer.echo(msgspec.json.encode(summary.to_json() | {"complete": complete}).decode())
