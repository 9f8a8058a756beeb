"""What several ranks cost and bring: exchanges, their bytes, cached tokens, host time, speed. Real processes.

`python -m benchmarks.collectives [--ranks 2 4] [--device cpu|cuda] [--only PART …] [--small] [--json]`; parts: control
(8 ranks too), traffic, capacity, planner, tick, speed. Ranks meet over gloo, the forward over NCCL where each has a GPU
of its own. Keys, with `cpN` for N ranks: `cpN_frame_ms`, `cpN_min_ms`, `cpN_tick_exchange_ms`, `collectives_idle`,
`collectives_tick`, `collectives_tick_in_flight`, `MODEL[_ep]_cpN_STEP_calls|bytes|expected_bytes|gather_calls|
gather_bytes` (of one rank, a step), `cpN_cached_tokens`, `cpN_found_tokens`, `planner_N_owners_s`, `cpN_tick_R_ms` (R
running), `MODEL_cpN_prefill_per_s`, `MODEL_cpN_decode_per_s`. It fails where bytes are not what arithmetic says.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.common import arguments, measure, report
from benchmarks.planner import problem
from benchmarks.rank_bodies import (
    MIN_NUMBERS,
    SpeedSizes,
    capacity,
    control_times,
    speed,
    tick_collectives,
    tick_times,
)
from benchmarks.rank_traffic import SHORT_PAGES, STEPS, StepTraffic, TrafficSizes, measure_traffic, unexpected
from benchmarks.ranks import RankProcesses
from benthic.common.units import format_size
from benthic.kvcache.planner import plan_eviction

PARTS = ("control", "traffic", "capacity", "planner", "tick", "speed")
MANY_RANKS = 8  # of the control's exchanges alone, beside those asked for
TICK_BOUND_MS = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    models: tuple[tuple[str, bool], ...]  # of the traffic: name, experts spread
    traffic: TrafficSizes
    speed_models: tuple[tuple[str, bool], ...]
    speed: SpeedSizes
    exchanges: int
    idle_s: float
    kept_pages: int
    running: tuple[int, ...]
    ticks: int


FULL = {
    "cpu": Sizes(
        models=(("llama-small", False), ("dsa-tiny", False), ("dsa-tiny", True)),
        traffic=TrafficSizes(page=16, chunk=256, context=256, rows=4),
        speed_models=(("llama-small", False), ("dsa-tiny", False), ("dsa-tiny", True)),
        speed=SpeedSizes(prefill=1024, context=256, batch=8, steps=32, chunk=256, page=16, repeats=3),
        exchanges=300, idle_s=2.0, kept_pages=64, running=(64, 256), ticks=600,
    ),
    "cuda": Sizes(
        models=(("llama-8b", False), ("dsa-8b", False), ("dsa-8b", True)),
        traffic=TrafficSizes(page=64, chunk=8192, context=4096, rows=16),
        speed_models=(("llama-8b", False), ("dsa-8b", False), ("dsa-8b", True)),
        speed=SpeedSizes(prefill=8192, context=4096, batch=16, steps=64, chunk=8192, page=64, repeats=3),
        exchanges=300, idle_s=2.0, kept_pages=64, running=(64, 256), ticks=600,
    ),
}  # fmt: skip
SMALL = Sizes(
    models=(("llama-tiny", False), ("dsa-tiny", True)),
    traffic=TrafficSizes(page=16, chunk=128, context=128, rows=2),
    speed_models=(("llama-tiny", False),),
    speed=SpeedSizes(prefill=128, context=32, batch=2, steps=4, chunk=128, page=16, repeats=1),
    exchanges=20, idle_s=0.2, kept_pages=32, running=(8,), ticks=20,
)  # fmt: skip


class Figures:
    """The table's rows, the JSON values, and what was not as it must be."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []
        self.values: dict[str, object] = {}
        self.wrong: list[str] = []

    def against_one(self, key: str, value: float, num_ranks: int) -> str:
        """Keep `cpN_key`, or with a model before it `MODEL_cpN_key`; in words, its ratio to one rank's."""
        name = key.format(f"cp{num_ranks}")
        self.values[name] = value
        one = self.values.get(key.format("cp1"))
        return f" ({value / one:.2f} of one rank's)" if num_ranks > 1 and isinstance(one, float | int) else ""


def show_control(processes: RankProcesses, sizes: Sizes, figures: Figures) -> None:
    """Frames and MINs alone; how many there are in a tick."""
    num_ranks = processes.size
    times = processes.run(control_times, sizes.exchanges)[0]
    figures.values |= {
        f"cp{num_ranks}_frame_ms": times.frame_ms,
        f"cp{num_ranks}_min_ms": times.min_ms,
        f"cp{num_ranks}_tick_exchange_ms": times.tick_ms,
    }
    text = f"frame {times.frame_ms:.2f} ms, MIN of {MIN_NUMBERS} {times.min_ms:.2f}, both in turn {times.tick_ms:.2f}"
    figures.rows.append((f"exchange of a tick, {num_ranks} ranks", text))
    if "collectives_idle" in figures.values:
        return  # the same whatever the number of ranks
    found = processes.run(tick_collectives, sizes.idle_s)[0]
    assert found is not None
    figures.values |= {
        "collectives_idle": found.idle,
        "collectives_tick": max(found.alone),
        "collectives_tick_in_flight": max(found.by_tick),
    }
    plain, both = found.by_tick.count(1), found.by_tick.count(2)
    figures.rows += [
        ("collectives while idle", f"{found.idle} in {found.idle_s:.1f} s (must be 0)"),
        ("collectives a tick, L1 alone", f"{max(found.alone)} in each of {len(found.alone)} ticks: the frame"),
        ("collectives a tick, with L2", f"{plain} ticks with 1, {both} with 2: the MIN where copies are in flight"),
    ]
    if found.idle or set(found.alone) != {1} or set(found.by_tick) - {1, 2}:
        figures.wrong.append("collectives a tick")


def show_traffic(processes: RankProcesses, device: str, sizes: Sizes, figures: Figures) -> None:
    """The forward's bytes of each model."""
    for model, spread in sizes.models:
        found = processes.run(measure_traffic, model, device, sizes.traffic, spread)[0]
        assert found is not None
        name = f"{model} --ep" if spread else model
        for step in STEPS:
            key = f"{name.replace(' --', '_')}_cp{processes.size}_{step}"
            t = found[step]
            figures.values |= {
                f"{key}_calls": t.calls,
                f"{key}_bytes": t.given,
                f"{key}_expected_bytes": t.expected_bytes,
                f"{key}_gather_calls": t.gather_calls,
                f"{key}_gather_bytes": t.gathered,
            }
            label = f"{name}, {processes.size} ranks, {_step_words(step, sizes.traffic)}"
            figures.rows.append((label, _traffic_words(t, processes.size)))
        figures.wrong += [f"traffic of {name} with {processes.size} ranks, {step}" for step in unexpected(found)]


def _step_words(step: str, sizes: TrafficSizes) -> str:
    return {
        "prefill": f"prefill {sizes.chunk:,}",
        "prefill_context": f"prefill {sizes.chunk:,} behind {sizes.context:,}",
        "prefill_short": f"prefill {SHORT_PAGES * sizes.page:,}, uneven",
        "decode": f"decode {sizes.rows} rows of {sizes.context:,}",
    }[step]


def _traffic_words(t: StepTraffic, num_ranks: int) -> str:
    layer = t.gathered / t.num_layers
    gathers = f"{t.gather_calls / t.num_layers:.2g} gathers a layer of {format_size(round(layer))} a rank"
    ratio = t.given / t.expected_bytes if t.expected_bytes else float("nan")
    calls = "" if t.moved == t.expected else "; CALLS OR BYTES DIFFER"
    step = f"a step {t.calls} calls, {format_size(t.given)} a rank, gathered {format_size(t.gathered * num_ranks)}"
    return f"{gathers}; {step}; {ratio:.2f} of theory{calls}"


def show_capacity(processes: RankProcesses, sizes: Sizes, figures: Figures) -> None:
    """Cached tokens with the same pages a rank."""
    found = processes.run(capacity, sizes.kept_pages)[0]
    assert found is not None
    cached = figures.against_one("{}_cached_tokens", found.cached_tokens, processes.size)
    again = figures.against_one("{}_found_tokens", found.found_tokens, processes.size)
    label = f"cached tokens, cp_size {processes.size}"
    text = f"{found.cached_tokens:,}{cached}; of prompts asked again {found.found_tokens:,} found{again}"
    figures.rows.append((label, text))
    one = figures.values.get("cp1_cached_tokens")
    if one is not None and found.cached_tokens != processes.size * int(str(one)):
        figures.wrong.append(f"capacity with {processes.size} ranks")


def show_planner(owners: Sequence[int], repeats: int, figures: Figures) -> None:
    """A plan over 2,000 candidates, as `benchmarks.planner` has it, by the number of lanes."""
    for count in owners:
        leaves, deficits = problem(7, 2_000, count, 7_877)
        timing = measure(lambda _, leaves=leaves, short=deficits: plan_eviction(leaves, short), lambda: None, repeats)  # type: ignore[misc]  # the defaults bind
        figures.values[f"planner_{count}_owners_s"] = timing.median_s
        figures.rows.append((f"planner, {count} owners, one 7,877 pages short", timing.describe()))


def show_ticks(processes: RankProcesses, sizes: Sizes, figures: Figures) -> None:
    """Host time of rank 0's ticks."""
    for running in sizes.running:
        times = processes.run(tick_times, running, sizes.ticks)[0]
        assert times is not None
        median, mean = statistics.median(times), statistics.fmean(times)
        p99 = sorted(times)[int(len(times) * 0.99)]
        ratio = figures.against_one(f"{{}}_tick_{running}_ms", median, processes.size)
        figures.values[f"cp{processes.size}_tick_{running}_mean_ms"] = mean
        text = f"{median:.3f} ms{ratio}, mean {mean:.3f}, p99 {p99:.3f}"
        figures.rows.append((f"host time of a tick, {running} running, {_ranks(processes.size)}", text))


def show_speed(processes: RankProcesses, device: str, sizes: Sizes, figures: Figures) -> None:
    """Tokens a second of small models."""
    for model, spread in sizes.speed_models:
        if spread and processes.size == 1:
            continue
        found = processes.run(speed, model, device, sizes.speed, spread)[0]
        assert found is not None
        name = f"{model}_ep" if spread else model
        if spread:  # one rank has no experts to spread
            for kind in ("prefill", "decode"):
                figures.values.setdefault(f"{name}_cp1_{kind}_per_s", figures.values.get(f"{model}_cp1_{kind}_per_s"))
        prefill = figures.against_one(f"{name}_{{}}_prefill_per_s", found.prefill_per_s, processes.size)
        decode = figures.against_one(f"{name}_{{}}_decode_per_s", found.decode_per_s, processes.size)
        label = f"tokens/s, {name.replace('_', ' --')}, {_ranks(processes.size)}"
        size = sizes.speed
        text = f"prefill of {size.prefill:,} {found.prefill_per_s:,.0f}{prefill}; "
        text += f"decode of {size.batch} {found.decode_per_s:,.0f}{decode}"
        figures.rows.append((label, text))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__ or "", repeats=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--small", action="store_true", help="the least of everything: does it run at all?")
    args = parser.parse_args(argv)
    wrong = [count for count in args.ranks if count not in (2, 4, 8)]
    if wrong:
        parser.error(f"--ranks {wrong[0]}: prompts here are cut for 2, 4 or 8")
    return args


def notes(args: argparse.Namespace) -> str:
    """What to keep in mind with these figures."""
    said = f"a tick's own bound with one rank is {TICK_BOUND_MS:.0f} ms"
    cores, most = len(os.sched_getaffinity(0)), max(args.ranks)
    if args.device == "cpu":
        said += f"; all ranks share {cores} cores, so times and tokens/s are information only, bytes and counts hold"
    elif most > torch.cuda.device_count():
        said += f"; {torch.cuda.device_count()} GPUs for {most} ranks: over gloo, for correctness, not for speed"
    return said


def run_schedulers(processes: RankProcesses, parts: set[str], sizes: Sizes, figures: Figures) -> None:
    """What needs no forward."""
    if "control" in parts and processes.size > 1:
        show_control(processes, sizes, figures)
    if "capacity" in parts:
        show_capacity(processes, sizes, figures)
    if "tick" in parts:
        show_ticks(processes, sizes, figures)


def run_forwards(processes: RankProcesses, device: str, parts: set[str], sizes: Sizes, figures: Figures) -> None:
    """What computes on the device."""
    if "traffic" in parts and processes.size > 1:
        show_traffic(processes, device, sizes, figures)
    if "speed" in parts:
        show_speed(processes, device, sizes, figures)


def run(args: argparse.Namespace, sizes: Sizes, figures: Figures) -> None:
    """The parts, with one rank first, which the others are compared with."""
    parts = set(args.only)
    for count in (1, *args.ranks):
        if parts & {"control", "capacity", "tick"}:  # on CPUs whatever the device
            with RankProcesses(count, "cpu") as processes:
                run_schedulers(processes, parts, sizes, figures)
        if parts & {"traffic", "speed"}:
            with RankProcesses(count, args.device) as processes:
                run_forwards(processes, args.device, parts, sizes, figures)
    if "control" in parts and not args.small and MANY_RANKS not in args.ranks:
        with RankProcesses(MANY_RANKS, "cpu") as processes:
            show_control(processes, sizes, figures)
    if "planner" in parts:
        show_planner((1, *args.ranks), args.repeats, figures)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = parse(argv)
    figures = Figures()
    try:
        run(args, SMALL if args.small else FULL[args.device], figures)
    finally:  # a part that fails must not cost the figures of those before it
        report("Several ranks", sorted(figures.rows), figures.values, as_json=args.json, note=notes(args))
    if figures.wrong:
        sys.exit(f"not as it must be: {', '.join(figures.wrong)}")


if __name__ == "__main__":
    main()
