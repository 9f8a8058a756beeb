"""Decode in CUDA graphs: one graph a batch size, captured largest first into one memory pool, batches padded up.

On the CPU the same class runs the same code on the same static buffers without a graph, so padding and metadata are
exercised everywhere. Inside a graph: the input ids come from `last_tokens` by slot, then the model, the logits, the
argmax, and its tokens go into `last_tokens`. The argmax is right for plain greedy rows; where a row samples otherwise
the sampler overwrites its entry afterwards on the same stream, before the next step can read it. Prompt tokens of a
short prefill are rows too (`graph_rows`): they stand in slots of `last_tokens` behind the scratch slot.

Padded rows have a context of one token in the pool's scratch page and the scratch slot of `last_tokens`: they touch
nobody's state. Lengths live on the device; their bound is the runner's and never changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.attention.interface import Attention
from benthic.common.layout import ceil_div
from benthic.config import RunnerConfig
from benthic.forward import ForwardBatch, StepInput
from benthic.kernels.greedy_pick import greedy_pick
from benthic.runner.graph_memory import logger, memory_profile, memory_table, reserved_bytes
from benthic.runner.graph_rows import CUDA_TOKENS, graph_rows, prompt_keys
from benthic.runner.static_buffers import StaticBuffers
from benthic.runner.streams import new_stream

FAMILY = "decode"
_LEAST_ROWS = 64  # of the largest default graph where prompts run in graphs: a page's tokens
_SLOTS, _POSITIONS, _KV_SLOTS, _SEQ_LENS = range(4)  # rows of the `rows` buffer


class Model(Protocol):
    """What the runner needs of a loaded model."""

    def __call__(self, batch: ForwardBatch, attention: Any, metadata: Any) -> torch.Tensor:
        """Hidden states [T, hidden_size] after the final norm; writes the new tokens' KV.

        `attention` is a backend of the model's own family, `metadata` what its `begin` made.
        """

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerShape:
    """The static numbers of a runner."""

    max_running: int  # request slots; slot max_running is scratch
    max_seq_len: int  # longest context
    page_size: int
    num_pages: int  # of the pool; page num_pages is scratch
    device: torch.device

    @property
    def scratch_slot(self) -> int:
        return self.max_running

    @property
    def first_prompt_slot(self) -> int:
        """From here on `last_tokens` holds prompt tokens that run as rows of a graph."""
        return self.max_running + 1

    @property
    def table_width(self) -> int:
        """Pages of the longest context."""
        return ceil_div(self.max_seq_len, self.page_size)


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Views of the static outputs: good until the next replay is queued."""

    hidden: torch.Tensor  # [n, hidden_size]
    logits: torch.Tensor  # float32 [n, vocab_size]
    tokens: torch.Tensor  # int64 [n], the argmax


def graph_sizes(shape: RunnerShape, config: RunnerConfig) -> tuple[int, ...]:
    """Rising sizes of the decode graphs: what the user asked for, else up to max_running or a few prompt tokens."""
    if config.graph_batch_sizes is None:
        return default_graph_sizes(max(shape.max_running, min(_LEAST_ROWS, prompt_limit(shape, config))), shape.device)
    largest = max(shape.max_running, prompt_limit(shape, config))
    return tuple(sorted(s for s in config.graph_batch_sizes if s <= largest))


def prompt_limit(shape: RunnerShape, config: RunnerConfig) -> int:
    """Tokens of a step with prompts up to which it runs in a graph. On a CPU nothing is won by it."""
    if config.graph_prefill_tokens is not None:
        return config.graph_prefill_tokens
    return CUDA_TOKENS if shape.device.type == "cuda" else 0


def default_graph_sizes(max_running: int, device: torch.device) -> tuple[int, ...]:
    """Rising batch sizes up to max_running. A CPU pays for every padded row, so its steps are smaller."""
    if device.type == "cuda":
        sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 257, 16), *range(288, max_running + 1, 32)]
    else:
        sizes = [*range(1, 9), *range(10, 17, 2), *range(20, 65, 4), *range(72, max_running + 1, 8)]
    return (*(s for s in sizes if s < max_running), max_running)


class DecodeGraphs:
    """Owns the decode family's static buffers and graphs.

    `last_tokens` int64 [max_running + 1 + the largest size] is the runner's.
    """

    def __init__(
        self,
        *,
        model: Model,
        attention: Attention,
        last_tokens: torch.Tensor,
        shape: RunnerShape,
        config: RunnerConfig,
    ) -> None:
        self.sizes = graph_sizes(shape, config)
        self._prompt_limit = prompt_limit(shape, config)
        self._model = model
        self._attention = attention
        self._shape = shape
        self._config = config
        self._last_tokens = last_tokens
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._growth: list[tuple[int, int]] = []
        self.buffers = StaticBuffers(FAMILY, shape.device)
        if not self.sizes:
            return
        largest = self.sizes[-1]
        self._rows = self.buffers.allocate("rows", (4, largest), torch.int64)
        self._page_table = self.buffers.allocate("page_table", (largest, shape.table_width), torch.int32)
        self._cu_query_lens = self.buffers.allocate("cu_query_lens", (1,), torch.int32)
        self._tokens = self.buffers.allocate("tokens", (largest,), torch.int64)
        self._hidden: torch.Tensor | None = None  # allocated at the first forward, which shows dtype and width
        self._logits: torch.Tensor | None = None
        self.buffers.alias("last_tokens", last_tokens, "the runner")

    def size_for(self, step: StepInput) -> int | None:
        """The least graph size that holds the step's tokens as rows; None where it has to run eagerly."""
        if step.num_tokens > step.num_decode and not self._takes_prompts(step):
            return None
        return next((s for s in self.sizes if s >= step.num_tokens), None)

    def _takes_prompts(self, step: StepInput) -> bool:
        few = step.num_tokens <= self._prompt_limit and not step.prompt_logprobs
        return few and prompt_keys(step) <= self._attention.most_prompt_keys

    def capture(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture every size, largest first; on the CPU, where nothing is captured, run the least once.

        `progress` gets (done, total).
        """
        sizes = tuple(reversed(self.sizes)) if self._shape.device.type == "cuda" else self.sizes[:1]
        if self._shape.device.type == "cuda":
            torch.cuda.empty_cache()  # what capture frees of earlier blocks would count as negative growth
        with memory_profile(self._config.profile_graph_memory, FAMILY, self._shape.device):
            for done, size in enumerate(sizes):
                progress(done, len(sizes))
                self._fill_with_scratch(size)
                before = reserved_bytes(self._shape.device)
                self._capture_one(size)
                self._growth.append((size, reserved_bytes(self._shape.device) - before))
            progress(len(sizes), len(sizes))
        if self._config.log_graph_buffers and self.sizes:
            logger.info("%s", memory_table(self.buffers, self._growth))

    def pad(self, step: StepInput, size: int) -> dict[str, NDArray[Any]]:
        """Host arrays of a step for the graph of `size` rows."""
        shape = self._shape
        found = graph_rows(step, shape.first_prompt_slot)
        num_rows = len(found)
        rows = np.empty((4, size), dtype=np.int64)
        rows[_SLOTS], rows[_POSITIONS], rows[_SEQ_LENS] = shape.scratch_slot, 0, 1
        rows[_KV_SLOTS] = shape.num_pages * shape.page_size
        rows[_SLOTS, :num_rows] = found.slots
        rows[_POSITIONS, :num_rows] = found.positions
        rows[_KV_SLOTS, :num_rows] = found.kv_slots
        rows[_SEQ_LENS, :num_rows] = found.seq_lens
        width = min(found.page_table.shape[1], shape.table_width)
        table = np.full((size, width), shape.num_pages, dtype=np.int32)
        table[:num_rows] = found.page_table[:, :width]
        arrays: dict[str, NDArray[Any]] = {"graph_rows": rows, "graph_table": table}
        if step.num_tokens == step.num_decode:
            assert np.array_equal(step.sample_slots, step.state_slots), "decode samples each of its rows, in order"
        else:
            arrays |= {"graph_prompts": found.prompt_tokens, "sample_rows": step.sample_rows}
        return arrays

    def replay(self, size: int, num_rows: int, tensors: dict[str, torch.Tensor]) -> DecodeOutput:
        """Run the graph of `size` on `pad`'s arrays, uploaded; outputs of the first num_rows rows."""
        table = tensors["graph_table"]
        if (prompts := tensors.get("graph_prompts")) is not None:
            first = self._shape.first_prompt_slot
            self._last_tokens[first : first + len(prompts)].copy_(prompts)
        self._rows[:, :size].copy_(tensors["graph_rows"])
        self._page_table[:size, : table.shape[1]].copy_(table)
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            self._forward(size)
        assert self._hidden is not None
        assert self._logits is not None
        return DecodeOutput(self._hidden[:num_rows], self._logits[:num_rows], self._tokens[:num_rows])

    def _capture_one(self, size: int) -> None:
        if self._shape.device.type != "cuda":
            self._forward(size)
            return
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        warm = new_stream(self._shape.device)
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):  # compiles kernels and lets libraries allocate, outside the capture
            for _ in range(2):
                self._forward(size)
        torch.cuda.current_stream().wait_stream(warm)
        torch.cuda.synchronize(self._shape.device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: copy threads may call CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=warm, capture_error_mode="thread_local"):
            self._forward(size)
        self._graphs[size] = graph

    def _fill_with_scratch(self, size: int) -> None:
        shape = self._shape
        for row, value in enumerate((shape.scratch_slot, 0, shape.num_pages * shape.page_size, 1)):
            self._rows[row, :size].fill_(value)
        self._page_table[:size].fill_(shape.num_pages)

    def _forward(self, size: int) -> None:
        """The family's step on the static buffers; this is what a graph holds."""
        slots = self._rows[_SLOTS, :size]
        batch = ForwardBatch(
            num_tokens=size,
            num_decode=size,
            max_seq_len=self._shape.max_seq_len,
            max_query_len=0,
            input_ids=self._last_tokens.gather(0, slots),
            positions=self._rows[_POSITIONS, :size],
            kv_slots=self._rows[_KV_SLOTS, :size],
            seq_lens=self._rows[_SEQ_LENS, :size].to(torch.int32),
            page_table=self._page_table[:size],
            cu_query_lens=self._cu_query_lens,
            in_graph=True,
        )
        hidden = self._model(batch, self._attention, self._attention.begin(batch))
        logits = self._model.logits(hidden)
        if self._hidden is None or self._logits is None:  # the first forward is the largest size, before any capture
            self._hidden = self.buffers.allocate("hidden", (self.sizes[-1], hidden.shape[1]), hidden.dtype)
            self._logits = self.buffers.allocate("logits", (self.sizes[-1], logits.shape[1]), torch.float32)
        greedy_pick(logits, slots, self._tokens[:size], self._last_tokens)
        # copies, so that the pool may reuse each graph's own outputs for the next smaller one
        self._hidden[:size].copy_(hidden)
        self._logits[:size].copy_(logits)
