"""`benthic simulate`: what a cache of given sizes would have found of a recorded trace, without model or device."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benthic.cli.simulate_plot import write_plot
from benthic.common.errors import ConfigError
from benthic.common.units import parse_size
from benthic.simulation import Report, Setup, read_trace, replay
from benthic.simulation.report import TIERS

_DEFAULT = Setup()
_NO_LIMIT = "no limit"


def register(app: typer.Typer) -> None:
    """Add `simulate` to `app`."""
    app.command()(simulate)


def _pages(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Tiers", show_default=_NO_LIMIT)


def _tiers(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Tiers")


def _engine(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Simulated engine")


def simulate(
    trace: Annotated[Path, typer.Option(help="JSON lines with timestamp (ms), input_length, output_length, hash_ids.")],
    l1_pages: Annotated[int | None, _pages("Pages of L1. E.g. --l1-pages 4000")] = None,
    l2_pages: Annotated[int | None, _pages("Pages of L2; 0: no L2. E.g. --l2-pages 20000")] = None,
    l3_pages: Annotated[int | None, _pages("Pages of L3; 0: no L3. E.g. --l3-pages 100000")] = None,
    l2_policy: Annotated[str, _tiers("write_through, write_through_selective or write_back.")] = _DEFAULT.l2_policy,
    l1_free_pages: Annotated[
        int | None,
        typer.Option(
            help="Pages of L1 that eviction keeps free. E.g. --l1-free-pages 16",
            rich_help_panel="Tiers",
            show_default="8192 tokens' pages, at most a quarter of L1",
        ),
    ] = None,
    owners: Annotated[int, _tiers("Lanes of each tier, one a rank; sizes are of each lane.")] = _DEFAULT.owners,
    page_tokens: Annotated[
        int, _tiers("Tokens of a page: what one of the trace's hash ids stands for.")
    ] = _DEFAULT.page_tokens,
    page_bytes: Annotated[str, _tiers("What a page takes. E.g. --page-bytes 64MiB")] = "22MiB",
    limit: Annotated[int | None, _engine("Replay the first so many requests only. E.g. --limit 1000")] = None,
    speed: Annotated[float, _engine("Requests come so many times as fast as recorded.")] = _DEFAULT.speed,
    max_running: Annotated[int, _engine("Requests running at once.")] = _DEFAULT.max_running,
    prefill_tokens_per_s: Annotated[float, _engine("Prefill of one request.")] = _DEFAULT.prefill_tokens_per_s,
    decode_tokens_per_s: Annotated[float, _engine("Decode of one request.")] = _DEFAULT.decode_tokens_per_s,
    copy_gb_per_s: Annotated[float, _engine("L1 to L2 and back, each lane.")] = _DEFAULT.copy_gb_per_s,
    disk_gb_per_s: Annotated[float, _engine("The disk of each lane.")] = _DEFAULT.disk_gb_per_s,
    tick_ms: Annotated[float, _engine("Scheduler ticks are at least this far apart.")] = _DEFAULT.tick_ms,
    plot: Annotated[Path, typer.Option(help="Where the plot goes (PNG).")] = Path("simulate.png"),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Write no plot.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Replay a recorded trace through the cache core and say what each tier would have found.

    Runs the decisions of a real server (the same code) with simulated copies, disk and compute: no model, no device. A
    tier whose size is left out has no limit; without any size the outcome is the most that a cache can find.

    Example: benthic simulate --trace conversation_trace.jsonl --l1-pages 4000 --l2-pages 20000 --l3-pages 100000
    """
    setup = Setup(
        owners=owners, l1_pages=l1_pages, l2_pages=l2_pages, l3_pages=l3_pages, l2_policy=l2_policy.replace("-", "_"),
        l1_free_pages=l1_free_pages, page_tokens=page_tokens, page_bytes=parse_size(page_bytes, "--page-bytes"),
        max_running=max_running, prefill_tokens_per_s=prefill_tokens_per_s, decode_tokens_per_s=decode_tokens_per_s,
        copy_gb_per_s=copy_gb_per_s, disk_gb_per_s=disk_gb_per_s, tick_ms=tick_ms, speed=speed,
    )  # fmt: skip
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: must be at least 1; leave it out for the whole trace")
    if not no_plot and not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}; name another file, or give --no-plot")
    started = time.perf_counter()
    requests = read_trace(trace, page_tokens, limit)
    with _progress(len(requests.requests)) as on_progress:
        report = replay(requests, setup, on_progress=on_progress)
    wall_s = time.perf_counter() - started
    written = None if no_plot else plot
    if written is not None:
        write_plot(written, report, _title(trace, setup, report))
    if as_json:
        typer.echo(json.dumps(_json(trace, setup, report, wall_s, written)))
    else:
        show(report, setup, wall_s, Console())
        if written is not None:
            typer.echo(f"plot: {written}")


def show(report: Report, setup: Setup, wall_s: float, console: Console) -> None:
    """Print the table and what stands beside it."""
    table = Table("tier", "pages a lane", "found pages", "of the input", "evicted pages")
    for column in table.columns[1:]:
        column.justify = "right"
    for tier in TIERS:
        found, evicted = f"{report.found[tier]:,}", f"{report.evicted[tier]:,}"
        table.add_row(tier.upper(), _size(setup, tier), found, f"{report.share(tier):.2%}", evicted)
    total = sum(report.found.values())
    table.add_row("all", "", f"{total:,}", f"{report.hit_share:.2%}", "", style="bold")
    console.print(table)
    times, refused = report.tick_us, ""
    if report.num_refused:
        refused = f"; {report.num_refused:,} refused, being longer than L1"
    console.print(
        escape(
            f"{report.num_requests:,} requests with {report.num_pages:,} pages of {setup.page_tokens} tokens{refused}\n"
            f"{times.count:,} ticks; CPU time in the core: "
            f"median {times.median:.0f} µs, p99 {times.p99:.0f} µs, max {times.max:.0f} µs\n"
            f"{report.trace_s:,.0f} s of the trace's time in {wall_s:.1f} s"
        ),
        highlight=False,
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("replaying requests", total=total)
        yield lambda done: bar.update(task, completed=done)


def _size(setup: Setup, tier: str) -> str:
    if (tier == "l2" and not setup.has_l2) or (tier == "l3" and not setup.has_l3):
        return "off"
    pages = {"l1": setup.l1_pages, "l2": setup.l2_pages, "l3": setup.l3_pages}[tier]
    return _NO_LIMIT if pages is None else f"{pages:,}"


def _title(trace: Path, setup: Setup, report: Report) -> str:
    sizes = ", ".join(f"{tier.upper()} {_size(setup, tier)}" for tier in TIERS)
    return f"{trace.name}: {report.hit_share:.2%} of the input's pages found ({sizes})"


def _json(trace: Path, setup: Setup, report: Report, wall_s: float, plot: Path | None) -> dict[str, Any]:
    sizes = {tier: _size(setup, tier).replace(",", "") for tier in TIERS}
    return {
        "trace": str(trace),
        **report.to_json(),
        "sizes": {tier: int(size) if size.isdigit() else size for tier, size in sizes.items()},
        "owners": setup.owners,
        "l2_policy": setup.l2_policy,
        "page_tokens": setup.page_tokens,
        "wall_s": wall_s,
        "plot": None if plot is None else str(plot),
    }
