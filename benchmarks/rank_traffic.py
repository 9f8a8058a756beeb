"""What the forward of one of several ranks exchanges in a step, counted in a whole engine, and what it should be.

Steps of one model: a prefill chunk without a context, one behind a cached context, a prompt of so few pages that ranks
have uneven shares, and a decode step of a few rows. Calls and bytes are of one rank, which *gives* so many; all ranks
give the same, padding included.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.engine import BenchEngine
from benchmarks.rank_models import checkpoint
from benchmarks.ranks import device_of, lead_or_follow, with_experts_spread
from benthic.common.layout import ceil_div
from benthic.config.kv_dtype import KVDtypes
from benthic.layers.linear_sum import sum_dtype
from benthic.models.kv_layout import choose_kv_formats, indexing_layers, kv_payloads
from benthic.parallel.collectives import GroupCollectives, Traffic
from benthic.parallel.launch import Ranks
from benthic.weights.model_config import LlamaConfig, ModelShape

STEPS = ("prefill", "prefill_context", "prefill_short", "decode")
SHORT_PAGES = 3  # of the short prompt
DECODE_STEPS = 4

Moved = dict[str, tuple[int, int]]  # by operation: calls, and bytes that a rank gives


@dataclass(frozen=True, slots=True)
class TrafficSizes:
    """Of the steps; tokens are whole pages."""

    page: int
    chunk: int  # new tokens of a prefill step
    context: int  # before them, and of each decode row
    rows: int  # of a decode step


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """One step of one model."""

    moved: Moved
    expected: Moved
    num_layers: int

    @property
    def calls(self) -> int:
        """Exchanges in the step."""
        return sum(calls for calls, _ in self.moved.values())

    @property
    def given(self) -> int:
        """Bytes that a rank gives."""
        return sum(size for _, size in self.moved.values())

    @property
    def gather_calls(self) -> int:
        """All-gathers in the step."""
        return self.moved.get("all_gather", (0, 0))[0]

    @property
    def gathered(self) -> int:
        """Bytes that a rank gives to all-gathers."""
        return self.moved.get("all_gather", (0, 0))[1]

    @property
    def expected_bytes(self) -> int:
        """What `given` should be."""
        return sum(size for _, size in self.expected.values())


def measure_traffic(
    ranks: Ranks, name: str, device: str, sizes: TrafficSizes, spread: bool
) -> dict[str, StepTraffic] | None:
    """By step, on rank 0; None on the others. `name`: one of `rank_models.NAMES`; `spread`: experts over the ranks."""
    ranks = with_experts_spread(ranks, spread)
    place = device_of(ranks, device)
    model = checkpoint(name, place)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    per_row = sizes.context // sizes.page + 1
    pages = ceil_div(sizes.rows * (per_row + 1) + 2 * (sizes.chunk + sizes.context) // sizes.page, ranks.layout.cp_size)
    engine = BenchEngine(
        model, ranks, device=device, dtype=str(dtype).removeprefix("torch."), page_size=sizes.page,
        chunk_tokens=max(sizes.chunk, sizes.context), max_running=sizes.rows, l1_pages=2 * pages, l1_free_pages=2,
        max_context=sizes.context + sizes.chunk + sizes.page,
    )  # fmt: skip
    found = lead_or_follow(engine, ranks, lambda engine: _all_steps(engine, ranks, model.config, sizes))
    if found is None:
        return None
    theory = Theory(model.config, dtype, place, ranks.layout.cp_size, spread, sizes)
    expected = {
        "prefill": theory.prefill(sizes.chunk),
        "prefill_context": theory.prefill(sizes.chunk, sizes.context),
        "prefill_short": theory.prefill(SHORT_PAGES * sizes.page),
        "decode": theory.decode(),
    }
    return {step: StepTraffic(found[step], expected[step], model.config.num_layers) for step in STEPS}


def _all_steps(engine: BenchEngine, ranks: Ranks, config: ModelShape, sizes: TrafficSizes) -> dict[str, Moved]:
    assert isinstance(ranks.group, GroupCollectives)
    traffic = ranks.group.traffic
    dice = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [dice.randrange(2, config.vocab_size) for _ in range(tokens)]

    def run(prompts: Sequence[list[int]], max_tokens: int, salt: str) -> Moved:
        before = _now(traffic)
        engine.run(list(prompts), max_tokens, salt=salt)
        return _less(_now(traffic), before)

    long = prompt(sizes.context + sizes.chunk)
    plain = run([prompt(sizes.chunk)], 1, "plain")
    run([long[: sizes.context]], 1, "behind")
    behind = run([long], 1, "behind")
    short = run([prompt(SHORT_PAGES * sizes.page)], 1, "short")
    rows = [prompt(sizes.context) for _ in range(sizes.rows)]
    run(rows, 1, "rows")
    first = run(rows, 1, "rows")  # the prefill of what a hit leaves to compute
    many = _less(run(rows, 1 + DECODE_STEPS, "rows"), first)
    decode = {name: (calls // DECODE_STEPS, size // DECODE_STEPS) for name, (calls, size) in many.items()}
    return {"prefill": plain, "prefill_context": behind, "prefill_short": short, "decode": decode}


def _now(traffic: Traffic) -> Moved:
    return {name: (calls, traffic.num_bytes[name]) for name, calls in traffic.calls.items()}


def _less(after: Moved, before: Moved) -> Moved:
    less: Moved = {}
    for name, (calls, size) in after.items():
        calls_before, size_before = before.get(name, (0, 0))
        if calls > calls_before:
            less[name] = (calls - calls_before, size - size_before)
    return less


class Theory:
    """Calls and bytes by arithmetic on the model's shape alone: records x bytes, pages x bytes, partial outputs."""

    def __init__(
        self,
        config: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        num_ranks: int,
        spread: bool,
        sizes: TrafficSizes,
    ) -> None:
        formats, _ = choose_kv_formats(KVDtypes(), config, dtype, device)
        slices = {p.name: p.slice_bytes for p in kv_payloads(config, sizes.page, formats)}
        self._config, self._sizes, self._ranks = config, sizes, num_ranks
        self._latent, self._index = slices["target_kv"], slices.get("index_k", 0)  # of a page in a layer
        self._indexing = 0 if isinstance(config, LlamaConfig) else len(indexing_layers(config))
        self._spread = 0 if not spread or isinstance(config, LlamaConfig) else sum(config.moe.layers)
        self._item = dtype.itemsize
        self._sum_item = sum_dtype(torch.empty(0, dtype=dtype, device=device)).itemsize

    def prefill(self, tokens: int, context: int = 0) -> Moved:
        """One row of so many new tokens behind a context that is cached."""
        c, sizes, ranks = self._config, self._sizes, self._ranks
        pages = self._most_pages(tokens // sizes.page)
        size = pages * (c.num_layers * self._latent + self._indexing * self._index)
        calls = c.num_layers
        if context:
            own = ceil_div(context // sizes.page, ranks)
            size += own * c.num_layers * self._latent
            size += own * self._indexing * self._index if self._selects(context + tokens) else 0
            calls += c.num_layers
        row = c.hidden_size * self._item
        moved: Moved = {"all_reduce": (1, row), "broadcast": (1, 8)}  # the sampled row, the sampled token
        if self._spread:
            rows = pages * sizes.page  # of each rank, padding included
            calls += self._spread
            size += self._spread * rows * row
            moved["reduce_scatter"] = (self._spread, self._spread * ranks * rows * c.hidden_size * self._sum_item)
        return {"all_gather": (calls, size), **moved}

    def _most_pages(self, pages: int) -> int:
        """Of the rank that computes most: each has two of 2n segments, of which the first are a page longer."""
        segments = 2 * self._ranks
        base, longer = divmod(pages, segments)
        return 2 * base + max((r < longer) + (segments - 1 - r < longer) for r in range(self._ranks))

    def decode(self) -> Moved:
        """A step of `rows` rows that begin their next page."""
        c, sizes, rows = self._config, self._sizes, self._sizes.rows
        value = c.head_dim if isinstance(c, LlamaConfig) else c.kv_lora_rank
        calls, size = c.num_layers, c.num_layers * rows * c.num_heads * (value + 1) * 4
        if self._indexing and self._selects(sizes.context + 1):
            own = ceil_div(sizes.context // sizes.page + 1, self._ranks) * sizes.page
            calls += self._indexing
            size += self._indexing * rows * min(self._topk, own) * 8  # score and position
        moved: Moved = {"all_gather": (calls, size), "broadcast": (1, 8 * rows)}
        if self._spread:
            moved["all_reduce"] = (self._spread, self._spread * rows * c.hidden_size * self._sum_item)
        return moved

    @property
    def _topk(self) -> int:
        c = self._config
        return 0 if isinstance(c, LlamaConfig) or c.indexer is None else c.indexer.topk

    def _selects(self, length: int) -> bool:
        return bool(self._topk) and length > self._topk


def unexpected(found: dict[str, StepTraffic]) -> list[str]:
    """The steps whose calls or bytes are not what they should be."""
    return [step for step, traffic in found.items() if traffic.moved != traffic.expected]
