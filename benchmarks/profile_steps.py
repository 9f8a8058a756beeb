"""Where a GPU's time goes in some steps of an engine: torch.profiler's kernels, by time.

On a CPU, where the profiler sees one thread's operations only, this merely shows that it runs.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

SHOWN = 30


@dataclass(frozen=True, slots=True)
class Spent:
    """One kernel's part."""

    name: str
    launches: int
    us: float


class Profiled:
    """Between `start` and `stop` the profiler watches the whole process."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        self._profiler: Any = profile(activities=[activity])
        self._started = 0.0
        self.wall_s = 0.0

    def start(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.start()
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self.wall_s = time.perf_counter() - self._started
        self._profiler.stop()

    def spent(self) -> list[Spent]:
        """Kernels by their time, the most first."""
        events = self._profiler.key_averages()
        found = [
            Spent(e.key, e.count, e.self_device_time_total if self._on_gpu else e.self_cpu_time_total) for e in events
        ]
        return sorted((s for s in found if s.us > 0), key=lambda s: -s.us)

    def show(self, title: str, num_layers: int, passes: float) -> None:
        """Print the most expensive kernels, µs a layer of one of `passes` forward passes."""
        spent = self.spent()
        total = sum(s.us for s in spent)
        busy = total / (self.wall_s * 1e6)
        table = Table()
        for column in ("kernel", "launches a pass", "µs a launch", "µs a layer", "share"):
            table.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=column != "kernel")
        for s in spent[:SHOWN]:
            table.add_row(
                s.name[:90], f"{s.launches / passes:.1f}", f"{s.us / s.launches:.1f}",
                f"{s.us / passes / num_layers:.2f}", f"{s.us / total:.1%}",
            )  # fmt: skip
        if rest := spent[SHOWN:]:
            us = sum(s.us for s in rest)
            table.add_row(f"{len(rest)} others", "", "", f"{us / passes / num_layers:.2f}", f"{us / total:.1%}")
        console = Console(width=160)
        console.print(
            f"{title}: {total / passes:,.0f} µs a pass in kernels, {self.wall_s / passes * 1e6:,.0f} µs by the clock "
            f"({busy:.0%} busy)"
        )
        console.print(table)
