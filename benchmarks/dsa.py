"""A DSA model with random weights through the whole engine: prefill, decode, and the first token by tier.

`python -m benchmarks.dsa [--config FILE] [--shared] [--kv-dtype fp8] [--only PART …] [--peer] [--profile] [--json]`;
parts: prefill, decode, tiers. The default config is `data/glm_dsa_8b.json` on a GPU and `data/tiny_dsa.json` on a CPU;
`--shared` shares selections between layers as GLM-5.2 does. Keys: `prefill_<tokens>_per_s`, `decode_b<batch>_per_s`,
`decode_b<batch>_step_ms`, `cold_s`, `l1_s`, `l2_s`, `l3_s`, `l3_floor_s` (raw reads of as many bytes), by depth
`l3_raw_gb_per_s`, `l3_reloads`, by round `l3_read_s`, `l3_computed_s` (the engine chose to), `l3_read_tokens` and
`l3_over_cold`, `peer_prefill_per_s`, `peer_decode_b1_per_s`. A repeated prompt must get the same answer from every
tier. `--peer` runs transformers on the same shape, eager, to tell whether the card is in its usual state; `--profile`
shows the kernels instead of the figures.

`--cp N [--ep]` runs one rank, then N: over NCCL with a GPU each, else over gloo on what they share, which is for
correctness alone. Prefill of 32k and 128k, decode, with `--only tiers` the tiers, and `equal`: benthic-tiny must answer
as on one rank. Keys have `cp1_` or `cpN_` before them, `cpN_…_ratio` is to one rank. `--small`: a CPU's sizes on a GPU.
"""

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.common import arguments, report
from benchmarks.dsa_parts import (
    PAGE,
    Figures,
    Model,
    Work,
    decode_prompts,
    measure_decode,
    measure_peer,
    measure_prefill,
    measure_tiers,
    speed_engine,
    tiers_engine,
)
from benchmarks.dsa_ranks import EQUAL, Job, compare_ranks
from benchmarks.engine import BenchEngine
from benchmarks.profile_steps import Profiled
from benchmarks.random_dsa import DATA, read_raw

PARTS = ("prefill", "decode", "tiers")
STEPS = 128  # decode steps of a run


def show_profiles(engine: BenchEngine, model: Model, work: Work, parts: list[str], chunk: int) -> None:
    """The kernels of prefill chunks and of decode steps."""
    if "prefill" in parts:
        for tokens in work.prefill:
            engine.run([model.prompt(tokens)], 1)
            profiled = Profiled()
            prompt = model.prompt(tokens)
            profiled.start()
            engine.run([prompt], 1)
            profiled.stop()
            profiled.show(f"prefill of {tokens:,} tokens in chunks of {chunk:,}", model.num_layers, -(-tokens // chunk))
    if "decode" in parts:
        prompts = decode_prompts(engine, model, work)
        for batch in work.batches:
            engine.run(prompts[:batch], work.steps, salt="decode")
            profiled = Profiled()
            ran = engine.run(prompts[:batch], work.steps, salt="decode", on_first=profiled.start)
            profiled.stop()
            steps = (sum(map(len, ran.tokens)) - ran.early) / batch
            profiled.show(f"decode, batch {batch}, context {work.context:,}", model.num_layers, steps)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__ or "", repeats=3)
    parser.add_argument("--config", type=Path, default=None, help="a config.json")
    parser.add_argument("--shared", action="store_true", help="selections shared between layers, as in GLM-5.2")
    parser.add_argument("--kv-dtype", default="auto", help="as the engine's option")
    parser.add_argument("--dtype", default="auto", help="as the engine's option")
    parser.add_argument("--only", nargs="+", default=None, choices=(*PARTS, EQUAL), help="default: all; equal: --cp")
    parser.add_argument("--cp", type=int, default=1, help="so many ranks beside one rank, in the same run")
    parser.add_argument("--ep", action="store_true", help="with --cp: experts spread over the ranks")
    parser.add_argument("--small", action="store_true", help="what a CPU gets, on a GPU too")
    parser.add_argument("--peer", action="store_true", help="run transformers beside")
    parser.add_argument("--profile", action="store_true", help="show the kernels of prefill and decode, no figures")
    parser.add_argument("--chunk", type=int, default=0, help="prefill tokens a step (default 8192; 256 on a CPU)")
    parser.add_argument("--max-context", type=int, default=0, help="default: just above the longest prompt")
    parser.add_argument("--prefill", type=int, nargs="+", default=None, help="tokens of the prompts")
    parser.add_argument("--batches", type=int, nargs="+", default=None, help="decode batches (default 1 16 64)")
    parser.add_argument("--dir", type=Path, default=None, help="folder for the disk floor (default: a temporary one)")
    args = parser.parse_args(argv)
    if args.cp > 1 and (args.peer or args.profile):
        parser.error("--peer and --profile are of one rank; leave --cp out")
    if args.cp == 1 and (args.ep or EQUAL in (args.only or ())):
        parser.error(f"--ep and --only {EQUAL} need several ranks: add --cp 2")
    args.only = args.only or ["prefill", "decode", EQUAL] if args.cp > 1 else args.only or list(PARTS)
    return args


def work_of(args: argparse.Namespace, large: bool) -> Work:
    """How much is measured; `large`: for a GPU."""
    if not large:
        prefill, batches = args.prefill or (256, 512), args.batches or (1, 3)
        return Work(tuple(prefill), tuple(batches), 192, 2048, 16, args.repeats)
    prefill = args.prefill or ((8192, 32_768) if args.cp == 1 else (32_768, 131_072))
    batches = args.batches or ((1, 16, 64) if args.cp == 1 else (1, 16))
    return Work(tuple(prefill), tuple(batches), 8192, 32_768, STEPS, args.repeats)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = parse(argv)
    on_gpu = torch.cuda.is_available()
    large = on_gpu and not args.small
    config = args.config or DATA / ("glm_dsa_8b.json" if large else "tiny_dsa.json")
    work = work_of(args, large)
    chunk = args.chunk or (8192 if large else 256)
    longest = max(*work.prefill, work.tier_tokens, work.context + work.steps)
    limit = args.max_context or -(-(longest + 4 * PAGE) // 4096) * 4096
    options: dict[str, object] = {"chunk_tokens": chunk, "max_context": limit, "page_size": PAGE, "dtype": args.dtype,
                                  "kv_dtype": args.kv_dtype}  # fmt: skip
    raw = read_raw(config, args.shared)
    figures = Figures(with_aims=large and config.name == "glm_dsa_8b.json" and args.cp == 1)
    try:
        if args.cp > 1:
            job = Job(raw, "cuda" if on_gpu else "cpu", options, work, args.ep, tuple(args.only))
            _in_folder(args.dir, lambda folder: compare_ranks(job, args.cp, figures, folder))
        else:
            run(Model(raw, torch.device("cuda" if on_gpu else "cpu"), options), work, args, figures, chunk)
    finally:  # a part that fails must not cost the figures of those before it
        if not args.profile:
            shared = ", shared selections" if args.shared else ""
            rows = [("model", f"{config.name}{shared}, random weights, KV {args.kv_dtype}")]
            if on_gpu:
                rows.append(("GPU", torch.cuda.get_device_name()))
            values = {"config": config.name, "shared": args.shared, "kv_dtype": args.kv_dtype, **figures.values}
            report("DSA", rows + figures.rows, values, as_json=args.json)
    if figures.wrong:
        sys.exit("\n".join(figures.wrong))


def run(model: Model, work: Work, args: argparse.Namespace, figures: Figures, chunk: int) -> None:
    """The parts that were asked for, one engine at a time."""
    if {"prefill", "decode"} & set(args.only):
        start = time.perf_counter()
        engine = speed_engine(model, work)
        figures.values["start_s"] = time.perf_counter() - start
        figures.rows.append(("start", f"{figures.values['start_s']:.1f} s for weights, warm-up and graphs"))
        try:
            if args.profile:
                show_profiles(engine, model, work, args.only, chunk)
            else:
                if "prefill" in args.only:
                    measure_prefill(engine, model, work, figures)
                if "decode" in args.only:
                    measure_decode(engine, model, work, figures)
        finally:
            engine.close()
            del engine
            _release(model.device)
    if "tiers" in args.only and not args.profile:
        _in_folder(args.dir, lambda folder: run_tiers(model, work, figures, folder))
        _release(model.device)
    if args.peer:
        measure_peer(model, work, figures)


def run_tiers(model: Model, work: Work, figures: Figures, folder: Path) -> None:
    """First tokens by tier, in an engine of their own."""
    engine = tiers_engine(model, work, folder)
    try:
        measure_tiers(engine, model, work, figures, folder)
    finally:
        engine.close()


def _in_folder(given: Path | None, act: Callable[[Path], None]) -> None:
    folder = given or Path(tempfile.mkdtemp(prefix="benthic-dsa-"))
    try:
        act(folder)
    finally:
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
