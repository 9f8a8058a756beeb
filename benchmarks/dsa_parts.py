"""The parts of `benchmarks.dsa`: engines of a DSA model with random weights, and what is timed in them."""

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Timing
from benchmarks.disk import Frames, RawDisk
from benchmarks.engine import BenchEngine
from benchmarks.peer_dsa import TransformersDsa
from benchmarks.random_dsa import random_dsa
from benchmarks.tiers_engine import KINDS, first_tokens
from benthic.common.layout import ceil_div
from benthic.parallel.launch import ALONE, Ranks
from benthic.tiers.disk.format import FrameGeometry

PAGE = 64
RAW_DEPTHS = (1, 2, 4, 8)
USUAL = {  # of glm_dsa_8b on an H200: what to reach, the byte or FLOP floor, and others' figures
    "prefill_8192_per_s": "aim ≥ 58,000; floor 118,000; vLLM 53,400; transformers' best 17,300",
    "prefill_32768_per_s": "aim ≥ 49,000; floor 87,000; vLLM 44,500; transformers' best 7,090",
    "decode_b1_per_s": "aim ≥ 480; floor 1,160; vLLM 338; transformers' best 120",
    "decode_b16_per_s": "aim ≥ 3,600; floor 4,400; vLLM 2,700; transformers' best 541",
    "decode_b64_per_s": "aim ≥ 9,500; floor 12,800; vLLM 8,400",
    "cold_s": "vLLM 0.736 s",
    "l1_s": "aim ≤ 0.03 s; vLLM 0.083",
    "l2_s": "aim ≤ 0.05 s; floor 0.016; vLLM 0.079 to 0.123",
    "l3_s": "aim ≤ 1.1 of the disk's floor, never later than cold; vLLM 1.4",
    "peer_prefill_per_s": "usual: 17,300",
    "peer_decode_b1_per_s": "usual: 11 to 15 (eager)",
}


@dataclass(frozen=True, slots=True)
class Work:
    """How much of everything."""

    prefill: tuple[int, ...]  # tokens of a prompt
    batches: tuple[int, ...]
    context: int  # of decode
    tier_tokens: int
    steps: int
    repeats: int


class Figures:
    """Owns the table's rows and the JSON values."""

    def __init__(self, with_aims: bool) -> None:
        self.rows: list[tuple[str, str]] = []
        self.values: dict[str, object] = {}
        self.wrong: list[str] = []  # for which the benchmark fails
        self._with_aims = with_aims

    def add(self, key: str, value: float, label: str, text: str) -> None:
        """One figure, with what is usual for it behind."""
        usual = USUAL.get(key, "") if self._with_aims else ""
        self.values[key] = value
        self.rows.append((label, f"{text}  ({usual})" if usual else text))


class Model:
    """The checkpoint's shape, options that every engine gets, and random prompts for it."""

    def __init__(
        self, raw: dict[str, Any], device: torch.device, options: dict[str, object], ranks: Ranks = ALONE
    ) -> None:
        self.raw, self.device, self.ranks, self._options = raw, device, ranks, options
        self.num_layers: int = raw["num_hidden_layers"]
        self._dice = random.Random(0)

    def engine(self, **options: object) -> BenchEngine:
        """Weights drawn, graphs captured. Of several ranks each calls it; see BenchEngine."""
        return BenchEngine(random_dsa(self.raw, self.device), self.ranks, **{**self._options, **options})

    def pages_a_rank(self, pages: int, rows: int) -> int:
        """So many pages of `rows` sequences over the ranks, whose lanes a sequence fills unevenly by a page."""
        size = self.ranks.layout.cp_size
        return pages if size == 1 else ceil_div(pages, size) + rows

    def prompt(self, tokens: int) -> list[int]:
        return [self._dice.randrange(2, self.raw["vocab_size"]) for _ in range(tokens)]


def speed_engine(model: Model, work: Work) -> BenchEngine:
    """An engine whose L1 holds every context of the decode runs and two of the longest prompts beside them."""
    largest = max(work.batches)
    pages = largest * -(-(work.context + 2 * work.steps) // PAGE) + 3 * -(-max(work.prefill) // PAGE)
    pages = model.pages_a_rank(pages, largest + 3)
    return model.engine(l1_pages=pages, max_running=largest, graph_batch_sizes=",".join(map(str, work.batches)))


def measure_prefill(engine: BenchEngine, model: Model, work: Work, figures: Figures) -> None:
    """Tokens a second up to the first token of one prompt."""
    for tokens in work.prefill:
        engine.run([model.prompt(tokens)], 1)  # kernels are compiled and tuned
        timing = Timing.of([engine.run([model.prompt(tokens)], 1).first_s for _ in range(work.repeats)])
        rate = timing.per_second(tokens)
        text = f"{rate:,.0f} tokens/s, {timing.describe()}"
        figures.add(f"prefill_{tokens}_per_s", rate, f"prefill, {tokens:,} tokens", text)


def decode_prompts(engine: BenchEngine, model: Model, work: Work) -> list[list[int]]:
    """Prompts of the decode runs, already computed, so that every run begins with all of its rows at once."""
    prompts = [model.prompt(work.context) for _ in range(max(work.batches))]
    engine.run(prompts, 1, salt="decode")
    return prompts


def measure_decode(engine: BenchEngine, model: Model, work: Work, figures: Figures) -> None:
    """Tokens a second of each batch size, all rows with a context of `context` and more."""
    prompts = decode_prompts(engine, model, work)
    for batch in work.batches:
        runs = [engine.run(prompts[:batch], work.steps, salt="decode") for _ in range(work.repeats + 1)]
        found = sum(runs[-1].cached)
        assert found >= batch * (work.context - PAGE), f"{found} tokens of {batch} contexts were in the cache"
        rate = statistics.median(run.decode_per_s for run in runs[1:])
        step = batch / rate * 1e3
        figures.add(
            f"decode_b{batch}_per_s", rate, f"decode, batch {batch}", f"{rate:,.0f} tokens/s, {step:.2f} ms a step"
        )
        figures.values[f"decode_b{batch}_step_ms"] = step


def tiers_engine(model: Model, work: Work, folder: Path) -> BenchEngine:
    """An engine with a host tier and a disk floor in `folder`, for a few of the long prompts."""
    pages = model.pages_a_rank(4 * -(-work.tier_tokens // PAGE), 4)
    on_gpu = model.device.type == "cuda"
    return model.engine(
        l1_pages=pages, max_running=1, graph_batch_sizes="1,64", l2_size="8GiB" if on_gpu else "64MiB",
        l3_dir=str(folder), l3_size="8GiB" if on_gpu else "128MiB",
    )  # fmt: skip


def measure_tiers(engine: BenchEngine, model: Model, work: Work, figures: Figures, folder: Path) -> None:
    """First token of one long prompt: cold, and with its prefix in each tier. `engine`: of `tiers_engine`."""
    seen = first_tokens(engine, work.tier_tokens, work.repeats, exact=model.device.type == "cpu")
    state = engine.engine.state()
    for kind in KINDS:
        timing = Timing.of(seen.seconds[kind])
        label = f"first token of {work.tier_tokens:,}, {kind.upper() if kind != 'cold' else kind}"
        figures.add(f"{kind}_s", timing.median_s, label, timing.describe())
    disk, owners = state.disks[0], model.ranks.layout.cp_size
    num_pages = work.tier_tokens // PAGE
    rates = raw_rates(folder, disk.slot_bytes, num_pages // owners)
    size = num_pages * disk.slot_bytes
    floor = size / (max(rates.values()) * 1e9)
    figures.values |= {"l3_floor_s": floor, "l3_reloads": state.tiers.reloads, **seen.choice()}
    figures.values["l3_raw_gb_per_s"] = {str(depth): rate for depth, rate in rates.items()}
    depths = ", ".join(f"{rate:.2f} at {depth}" for depth, rate in rates.items())
    raw = f"raw reads of {size / 1e9:.2f} GB: {floor:.3f} s (GB/s by depth: {depths})"
    expected = disk.us_per_page_read * ceil_div(num_pages, owners) / 1e6
    store = f"the store expects {expected:.3f} s" if expected else "the store's rate is not known"
    l3_s = Timing.of(seen.seconds["l3"]).median_s
    figures.rows.append(("disk", f"{raw}; {store}; L3 took {l3_s / floor:.2f} of that"))
    figures.rows.append(("L3 by round", seen.describe_choice()))


def raw_rates(folder: Path, slot_bytes: int, num_slots: int) -> dict[int, float]:
    """GB/s of raw reads by depth, over the first `num_slots` slots of a file, which nobody has read since they were
    written: each depth reads a part of its own, since a disk behind a cache would give what it has just given faster.
    """
    slab = max(folder.rglob("slab-*.dat"), key=lambda path: path.stat().st_size)
    geometry = FrameGeometry(slot_bytes - 4096, 1, (("all", slot_bytes - 4096),))
    part = min(num_slots, slab.stat().st_size // slot_bytes) // len(RAW_DEPTHS)
    frames = Frames(part, geometry.frame_bytes)
    for index in range(part):  # fault the memory in: the first depth would pay for it
        frames.frame(index)[:] = bytes(geometry.frame_bytes)
    disk = RawDisk(slab, geometry, frames)
    try:
        return {depth: disk.read(part, depth, first=i * part) for i, depth in enumerate(RAW_DEPTHS)}
    finally:
        disk.close()


def measure_peer(model: Model, work: Work, figures: Figures) -> None:
    """Transformers on the same shape."""
    dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
    peer = TransformersDsa(model.raw, model.device, dtype)
    tokens = work.prefill[0]
    peer.prefill(model.prompt(tokens))
    seconds, cache = peer.prefill(model.prompt(tokens))
    figures.add(
        "peer_prefill_per_s", tokens / seconds, f"transformers, prefill {tokens:,}", f"{tokens / seconds:,.0f} tokens/s"
    )
    rate = 1 / peer.decode(cache, 8)
    figures.add("peer_decode_b1_per_s", rate, "transformers, decode, batch 1", f"{rate:,.1f} tokens/s")
