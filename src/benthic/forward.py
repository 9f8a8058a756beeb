"""What one forward pass carries: `StepInput` (host arrays, from the scheduler) and `ForwardBatch` (device tensors).

Letters: T tokens of the step, D decode rows, P prefill rows (one a request), R = D + P rows, S sampled rows, M pages
of the longest row. Tokens are ordered: the D decode tokens, then each prefill's tokens one after another.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.parallel.cp_split import RankStep

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """How to choose a token for each of S rows. Rows are in the order of `StepInput.sample_rows`.

    `None` for an optional array means that no row wants it. A row's noise depends on (seed, choice, position) alone.
    """

    temperature: Float32  # [S]; 0: greedy
    seed: Int64  # [S]
    choice: Int64  # [S]
    position: Int64  # [S] position in the sequence of the token to be sampled
    top_k: Int32 | None = None  # [S]; 0: off
    top_p: Float32 | None = None  # [S]; 1: off
    min_p: Float32 | None = None  # [S]; 0: off
    penalty_rows: Int32 | None = None  # [S] indices into the penalty state (the request's slot); -1: none
    presence: Float32 | None = None  # [S], with penalty_rows
    frequency: Float32 | None = None  # [S], with penalty_rows
    repetition: Float32 | None = None  # [S], with penalty_rows
    bias: tuple[Int64, Int64, Float32] | None = None  # (row, token, added) triples; -inf forbids (min_tokens)
    logprobs: Int32 | None = None  # [S]; top-k wanted, 0: chosen only, -1: none
    hidden: Int64 | None = None  # indices into the S rows whose hidden states are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyInit:
    """(Re)start the penalty state of a slot before this step's sampling.

    Which tokens stand in its prompt and output.
    """

    slot: int
    prompt: Int32
    output: Int32  # generated so far (after a preemption); counted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step for the runner: plain host arrays that nobody changes afterwards."""

    tick: int
    num_decode: int  # D
    query_lens: Int32  # [P] new tokens of each prefill row
    token_ids: Int32  # [T]; the D decode entries are ignored: the device's last token of the row's slot is taken
    positions: Int64  # [T]
    kv_slots: Int64  # [T] where each new token's KV goes: page * page_size + offset
    seq_lens: Int32  # [R] context of each row, this step's tokens included
    page_table: Int32  # [R, M] L1 page of each page of the row; past the row's length: any valid page
    state_slots: Int64  # [R] each row's request slot: the index of its state that lives on the device
    sample_rows: Int64  # [S] token rows (of T) to sample after: every decode row, and the last token of ended prefills
    sample_slots: Int64  # [S] slots that receive the sampled token
    sampling: SamplingInput
    penalty_inits: tuple[PenaltyInit, ...] = ()
    prompt_logprobs: tuple[tuple[int, int, int, Int32], ...] = ()
    """(first token row, count, top-k, next tokens int32[count]).

    Rows whose distribution over the *next* prompt token is wanted.
    """

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Log-probabilities of n positions under the raw distribution (before temperature, penalties and bias)."""

    chosen: Float32  # [n]
    top_ids: Int32  # [n, K], best first; K the largest wanted in the step
    top: Float32  # [n, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step brought back to the host."""

    tokens: Int32  # [S]
    logprobs: LogprobRows | None = None  # [S] rows, where any row wanted them
    prompt_logprobs: tuple[LogprobRows, ...] = ()  # as StepInput.prompt_logprobs
    hidden: Float32 | None = None  # [len(sampling.hidden), hidden_size]


class LayerHooks(Protocol):
    """Told how far one step's forward is, so that copies of its pages can go on beside it, layer by layer.

    Called on the runner's thread, on CUDA with its stream as the current one. A step calls begin, then before_layer and
    after_layer of each layer in order, or before_all and after_all where layers can't call (a graph's replay), then
    end; end alone where it never began. Between begin and end each method may wait, or let the stream wait.
    """

    def begin(self) -> None:
        """The step's work starts."""

    def before_layer(self, index: int) -> None:
        """Layer `index` will read and write its KV. Raises what kept the KV that it needs from coming."""

    def after_layer(self, index: int) -> None:
        """Layer `index` has written its KV."""

    def before_all(self) -> None:
        """`before_layer` for every layer."""

    def after_all(self) -> None:
        """`after_layer` for every layer."""

    def end(self, failed: bool) -> None:
        """Nothing of the step touches KV after this; `failed`: what it should have written may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """The device's side of a `RankStep`, whose arrays these are by name. Slots and pages as it says there."""

    step: RankStep
    max_decode_len: int  # the longest decode row, pages of all ranks counted; 0: none. Replicated
    max_prefill_len: int  # where the prefill row that goes furthest ends; 0: none. Replicated
    gather_rows: torch.Tensor  # int64 [T - D]
    work_slots: torch.Tensor  # int64 [T]
    context_pages: torch.Tensor  # int64
    context_from: torch.Tensor  # int64
    context_to: torch.Tensor  # int64
    write_rows: torch.Tensor  # int64
    write_slots: torch.Tensor  # int64
    decode_table: torch.Tensor  # int32 [D, M']
    decode_lens: torch.Tensor  # int32 [D]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """What the model and the attention backend see. All tensors are on the device; the host numbers are replicated.

    With context parallelism (`ranks`) it holds the rows that this rank computes: T = N, the prefill rows are its
    segments, `kv_slots` and the segments' rows of `page_table` are of the work pool (padding: its scratch page), and
    the decode rows' `page_table` means nothing; the attention backend has the rest from `ranks`.

    In a decode graph the tensors are static buffers: rows past the real batch have seq_len 1, page 0 of the table =
    the pool's scratch page, and write their KV there.
    """

    num_tokens: int  # T
    num_decode: int  # D
    max_seq_len: int  # bound of seq_lens; of the buffers, not of the batch, inside a graph
    max_query_len: int  # longest prefill row; 0 without prefills
    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    kv_slots: torch.Tensor  # int64 [T]
    seq_lens: torch.Tensor  # int32 [R]
    page_table: torch.Tensor  # int32 [R, M]
    cu_query_lens: torch.Tensor  # int32 [P + 1] offsets of the prefill rows' tokens, counted from token D
    query_lens_host: tuple[int, ...] = field(default=())  # [P], what the torch backend loops over
    seq_lens_host: tuple[int, ...] = field(default=())  # [R]
    in_graph: bool = False
    hooks: LayerHooks | None = None
    ranks: RankBatch | None = None
