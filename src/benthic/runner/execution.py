"""One step: upload, forward (decode graph or eager), sample, start the way back. Runs on the runner's thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.attention.interface import Attention
from benthic.forward import ForwardBatch, LayerHooks, LogprobRows, StepInput, StepOutput
from benthic.parallel.collectives import Collectives
from benthic.parallel.cp_split import RankStep
from benthic.parallel.layout import SINGLE, ParallelLayout
from benthic.runner.copy_out import CopyOut, InFlight
from benthic.runner.graphs import DecodeGraphs, Model, RunnerShape
from benthic.runner.rank_rows import Arrays, padded, rank_arrays, rank_batch, rows_for_all, split
from benthic.runner.sampler import DeviceLogprobs, Sampler, log_probabilities
from benthic.runner.sampling_plan import SamplingPlan
from benthic.runner.staging import Staging

PROMPT_LOGPROB_ROWS = 512  # rows whose logits exist at once: 512 x 128k x 4 B = 0.26 GB

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose work is queued."""

    flight: InFlight
    finish: Callable[[dict[str, NDArray[Any]]], StepOutput]

    def done(self) -> bool:
        """Whether `output` would return at once."""
        return self.flight.done()

    def output(self) -> StepOutput:
        """Wait for the copies."""
        return self.finish(self.flight.wait())


@dataclass(frozen=True, slots=True)
class _Found:
    """What the S sampled rows come from."""

    hidden: torch.Tensor  # [S, hidden_size]
    logits: torch.Tensor  # float32 [S, vocab_size]; hidden states where S is 0
    greedy: torch.Tensor | None = None  # int64 [S], where the argmax is in `last_tokens` already


class StepExecutor:
    """Owns what steps leave on the device between each other: last_tokens, penalty counts, static buffers."""

    def __init__(
        self,
        *,
        model: Model,
        attention: Attention,
        graphs: DecodeGraphs,
        last_tokens: torch.Tensor,
        sampler: Sampler,
        shape: RunnerShape,
        layout: ParallelLayout = SINGLE,
        group: Collectives | None = None,
    ) -> None:
        """`group` joins the ranks of `layout`; None: there is one."""
        self._model = model
        self._attention = attention
        self._graphs = graphs
        self._shape = shape
        self._last_tokens = last_tokens
        self._sampler = sampler
        self._staging = Staging(shape.device)
        self._copy_out = CopyOut(shape.device)
        self._layout = layout
        self._group = group

    def execute(self, step: StepInput, hooks: LayerHooks | None = None) -> Launched:
        """Queue the step's work; on a CPU, do it. The hooks' `end` is called even where it fails."""
        if hooks is None:
            return self._execute(step, None)
        failed = True
        try:
            hooks.begin()
            launched = self._execute(step, hooks)
            failed = False
        finally:
            hooks.end(failed)
        return launched

    def _execute(self, step: StepInput, hooks: LayerHooks | None) -> Launched:
        if self._group is not None:
            return self._execute_rank(step, hooks, self._group)
        plan = self._sampler.plan(step.sampling, step.penalty_inits)
        arrays = dict(plan.arrays)
        arrays["sample_slots"] = step.sample_slots
        size = self._graphs.size_for(step)
        arrays.update(self._eager_arrays(step) if size is None else self._graphs.pad(step, size))
        tensors = self._staging.upload(arrays)
        self._sampler.start_penalties(tensors)
        results: Tensors = {}
        if size is None:
            found = self._eager_rows(step, plan, tensors, hooks, results)
        else:
            found = self._replay(size, step, plan, tensors, hooks)
        if plan.num_rows:
            self._sample(plan, tensors, found, results)
        return Launched(self._copy_out.start(results), _Assembly(step, plan))

    def _eager_rows(
        self, step: StepInput, plan: SamplingPlan, tensors: Tensors, hooks: LayerHooks | None, results: Tensors
    ) -> _Found:
        hidden = self._eager(step, tensors, hooks)
        self._prompt_logprobs(step, hidden, tensors, results)
        rows = hidden.index_select(0, tensors["sample_rows"])
        logits = self._model.logits(rows) if plan.num_rows else rows
        return _Found(rows[: plan.num_rows], logits[: plan.num_rows])

    def _replay(
        self, size: int, step: StepInput, plan: SamplingPlan, tensors: Tensors, hooks: LayerHooks | None
    ) -> _Found:
        if hooks is not None:
            hooks.before_all()
        decoded = self._graphs.replay(size, step.num_tokens, tensors)
        if hooks is not None:
            hooks.after_all()
        if step.num_tokens == step.num_decode:
            return _Found(decoded.hidden, decoded.logits, decoded.tokens)
        rows = tensors["sample_rows"]
        return _Found(decoded.hidden.index_select(0, rows), decoded.logits.index_select(0, rows))

    # --- one of several ranks -----------------------------------------------------------------------------------------

    def _execute_rank(self, step: StepInput, hooks: LayerHooks | None, group: Collectives) -> Launched:
        """The first rank samples for all; the others learn the tokens on the device, for their next step's input."""
        leads = self._layout.leads
        part = split(step, self._shape.page_size, group) if self._layout.cp_size > 1 else None
        plan = self._sampler.plan(step.sampling, step.penalty_inits) if leads else None
        arrays = self._eager_arrays(step) if part is None else self._rank_arrays(step, part)
        if plan is not None:
            arrays.update(plan.arrays)
        arrays["sample_slots"] = step.sample_slots
        tensors = self._staging.upload(arrays)
        results: Tensors = {}
        if plan is not None:
            self._sampler.start_penalties(tensors)
        hidden = self._eager(step, tensors, hooks, part)
        self._prompt_logprobs(step, hidden, tensors, results, part)
        if not len(step.sample_rows):
            return Launched(self._copy_out.start(results), _Assembly(step, plan))
        sampled_hidden = self._rows(hidden, step.sample_rows, part)
        if plan is not None:
            self._sample(plan, tensors, _Found(sampled_hidden, self._model.logits(sampled_hidden)), results)
            tokens = results["tokens"].to(torch.int64)
        else:
            tokens = torch.empty(len(step.sample_rows), dtype=torch.int64, device=self._shape.device)
        group.broadcast(tokens)
        if plan is None:
            self._last_tokens.index_copy_(0, tensors["sample_slots"], tokens)
            results["tokens"] = tokens.to(torch.int32)
        return Launched(self._copy_out.start(results), _Assembly(step, plan))

    def _rank_arrays(self, step: StepInput, part: RankStep) -> Arrays:
        rows = len(part.own_rows)
        rows = padded_rows(max(1, rows)) if self._shape.device.type == "cpu" else max(1, rows)  # never an empty product
        arrays = rank_arrays(step, part, rows, self._shape.page_size)
        arrays["decode_slots"] = step.state_slots[: step.num_decode]
        arrays.update(self._prompt_arrays(step))
        return arrays

    def _rows(self, hidden: torch.Tensor, rows: NDArray[np.int64], part: RankStep | None) -> torch.Tensor:
        """Hidden states of these rows of the step's T: on every rank where one computed them alone."""
        if part is None or (rows < part.num_decode).all():  # each rank has all decode rows, at the same places
            return hidden.index_select(0, torch.from_numpy(rows).to(hidden.device))
        assert self._group is not None
        return rows_for_all(hidden, part, rows, self._group)

    def _eager_arrays(self, step: StepInput) -> Arrays:
        cu_query_lens = np.zeros(len(step.query_lens) + 1, dtype=np.int32)
        np.cumsum(step.query_lens, out=cu_query_lens[1:])
        rows, samples = step.num_tokens, len(step.sample_rows)
        if self._shape.device.type == "cpu":  # what is added belongs to no sequence and writes to the scratch page
            rows, samples = padded_rows(rows), padded_rows(samples) if samples > 1 else samples
        return {
            "token_ids": padded(step.token_ids, rows, 0),
            "positions": padded(step.positions, rows, 0),
            "kv_slots": padded(step.kv_slots, rows, self._shape.num_pages * self._shape.page_size),
            "seq_lens": step.seq_lens,
            "page_table": step.page_table,
            "decode_slots": step.state_slots[: step.num_decode],
            "sample_rows": padded(step.sample_rows, samples, 0),
            "cu_query_lens": cu_query_lens,
            **self._prompt_arrays(step),
        }

    def _prompt_arrays(self, step: StepInput) -> Arrays:
        for _, count, _, tokens in step.prompt_logprobs:
            assert len(tokens) == count
        return {f"prompt{i}": tokens for i, (_, _, _, tokens) in enumerate(step.prompt_logprobs)}

    def _eager(
        self, step: StepInput, tensors: Tensors, hooks: LayerHooks | None, part: RankStep | None = None
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of any step, or of its `part`; on a CPU with rows of padding behind them."""
        num_decode = step.num_decode
        input_ids = tensors["token_ids"].to(torch.int64)
        if num_decode:
            input_ids[:num_decode] = self._last_tokens.index_select(0, tensors["decode_slots"])
        if part is not None:
            batch = rank_batch(step, part, tensors, input_ids, hooks)
            return self._model(batch, self._attention, self._attention.begin(batch))
        batch = ForwardBatch(
            num_tokens=step.num_tokens,
            num_decode=num_decode,
            max_seq_len=int(step.seq_lens.max()),
            max_query_len=int(step.query_lens.max()) if len(step.query_lens) else 0,
            input_ids=input_ids,
            positions=tensors["positions"],
            kv_slots=tensors["kv_slots"],
            seq_lens=tensors["seq_lens"],
            page_table=tensors["page_table"],
            cu_query_lens=tensors["cu_query_lens"],
            query_lens_host=tuple(step.query_lens.tolist()),
            seq_lens_host=tuple(step.seq_lens.tolist()),
            hooks=hooks,
        )
        return self._model(batch, self._attention, self._attention.begin(batch))

    def _sample(self, plan: SamplingPlan, tensors: Tensors, found: _Found, results: Tensors) -> None:
        sampled = self._sampler.sample(found.logits, plan, tensors, found.greedy)
        if sampled.tokens is not found.greedy:  # the graph has put its own argmax there already
            self._last_tokens.index_copy_(0, tensors["sample_slots"], sampled.tokens)
        results["tokens"] = sampled.tokens.to(torch.int32)
        if sampled.logprobs is not None:
            _put("logprobs", sampled.logprobs, results)
        if "hidden_rows" in tensors:
            results["hidden"] = found.hidden.index_select(0, tensors["hidden_rows"]).float()

    def _prompt_logprobs(
        self, step: StepInput, hidden: torch.Tensor, tensors: Tensors, results: Tensors, part: RankStep | None = None
    ) -> None:
        for i, (first, count, num_top, _) in enumerate(step.prompt_logprobs):
            parts = []
            for start in range(0, count, PROMPT_LOGPROB_ROWS):
                stop = min(start + PROMPT_LOGPROB_ROWS, count)
                rows = hidden[first + start : first + stop]
                if part is not None:
                    rows = self._rows(hidden, np.arange(first + start, first + stop), part)
                if not self._layout.leads:
                    continue
                logits = self._model.logits(rows)
                parts.append(log_probabilities(logits, tensors[f"prompt{i}"][start:stop].to(torch.int64), num_top))
            if parts:
                _put(f"prompt{i}", _concatenate(parts), results)


@dataclass(frozen=True, slots=True)
class _Assembly:
    """From what came back to a StepOutput."""

    step: StepInput
    plan: SamplingPlan | None  # None: another rank samples, and has all but the tokens

    def __call__(self, arrays: dict[str, NDArray[Any]]) -> StepOutput:
        if self.plan is None:
            return StepOutput(tokens=arrays.get("tokens", np.zeros(0, dtype=np.int32)))
        logprobs = None
        if "logprobs.chosen" in arrays:
            logprobs = _spread(_take("logprobs", arrays), self.plan.logprob_rows, self.plan.num_rows)
        empty = LogprobRows(
            chosen=np.zeros(0, np.float32), top_ids=np.zeros((0, 0), np.int32), top=np.zeros((0, 0), np.float32)
        )
        return StepOutput(
            tokens=arrays.get("tokens", np.zeros(0, dtype=np.int32)),
            logprobs=logprobs,
            prompt_logprobs=tuple(
                _take(f"prompt{i}", arrays) if count else empty
                for i, (_, count, _, _) in enumerate(self.step.prompt_logprobs)
            ),
            hidden=arrays.get("hidden"),
        )


def padded_rows(rows: int) -> int:
    """Rows of an eager step on a CPU: 8, 16, then multiples of 32, from 512 on of 128.

    Products of ever new sizes leave holes in the heap and code in oneDNN's cache; so a process meets few sizes, and few
    rows are computed in vain.
    """
    step = 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 512 else 128
    return -(-rows // step) * step


def _put(name: str, rows: DeviceLogprobs, results: Tensors) -> None:
    results[name + ".chosen"], results[name + ".top_ids"], results[name + ".top"] = rows.chosen, rows.top_ids, rows.top


def _take(name: str, arrays: dict[str, NDArray[Any]]) -> LogprobRows:
    return LogprobRows(chosen=arrays[name + ".chosen"], top_ids=arrays[name + ".top_ids"], top=arrays[name + ".top"])


def _concatenate(parts: list[DeviceLogprobs]) -> DeviceLogprobs:
    return DeviceLogprobs(
        torch.cat([p.chosen for p in parts]),
        torch.cat([p.top_ids for p in parts]),
        torch.cat([p.top for p in parts]),
    )


def _spread(found: LogprobRows, rows: NDArray[np.int64], num_rows: int) -> LogprobRows:
    """All S rows; those that asked for nothing hold NaN and -1."""
    if len(rows) == num_rows:
        return found
    width = found.top.shape[1]
    chosen = np.full(num_rows, np.nan, dtype=np.float32)
    top_ids = np.full((num_rows, width), -1, dtype=np.int32)
    top = np.full((num_rows, width), np.nan, dtype=np.float32)
    chosen[rows], top_ids[rows], top[rows] = found.chosen, found.top_ids, found.top
    return LogprobRows(chosen=chosen, top_ids=top_ids, top=top)
