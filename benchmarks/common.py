"""What all benchmarks share: repeated timing, the machine, a table for people, one JSON line for programs."""

import argparse
import gc
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and spread of repeated runs, in seconds."""

    median_s: float
    least_s: float
    most_s: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        """Sum up the durations of single runs."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def per_second(self, amount: float) -> float:
        """The rate at the median, for `amount` of work a run."""
        return amount / self.median_s

    def describe(self) -> str:
        """Median and spread for a table."""
        return f"{_duration(self.median_s)}  ({_duration(self.least_s)} … {_duration(self.most_s)}, {self.runs} runs)"


def measure(run: Callable[[Prepared], object], prepare: Callable[[], Prepared], repeats: int) -> Timing:
    """Time `run(prepare())` `repeats` times; only `run` is timed, with no garbage of earlier runs to collect."""
    seconds = []
    for _ in range(repeats):
        prepared = prepare()
        gc.collect()
        start = time.perf_counter()
        run(prepared)
        seconds.append(time.perf_counter() - start)
    return Timing.of(seconds)


def arguments(description: str, repeats: int) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has: `--json` and `--repeats`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"timed runs of each figure (default {repeats})")
    return parser


def machine() -> dict[str, object]:
    """What a figure depends on besides the code: Python, torch, processor, cores."""
    return {
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "cpu": _cpu_name(),
    }


def report(
    title: str, rows: Sequence[tuple[str, str]], figures: Mapping[str, object], *, as_json: bool, note: str = ""
) -> None:
    """Print the rows as a table, and with `as_json` the figures (and the machine) as the last line."""
    where = machine()
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    table.add_row("machine", f"{where['cpu']}; Python {where['python']}, torch {where['torch']}")
    console = Console()
    console.print(table)
    if note:
        console.print(note)
    if as_json:
        print(json.dumps({**figures, **where}))


def _duration(seconds: float) -> str:
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds:.2f} s"


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()
