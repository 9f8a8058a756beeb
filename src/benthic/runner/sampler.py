"""Chooses tokens on the device, without ever waiting for it. CPU and CUDA.

Order for a row: added bias and bans, penalties (repetition, then frequency and presence), and, unless it is greedy,
temperature, top-k, top-p, min-p, then the largest of logit + Gumbel noise. Top-p's mass is of what top-k left; min-p is
relative to the likeliest token. All tokens that tie with the last one kept are kept: what a row keeps then depends on
its logits alone, not on how a sort broke the tie. Greedy rows take the lowest index of the largest logit.
Log-probabilities are of the raw logits, before all of this.
"""

from dataclasses import dataclass

import numpy as np
import torch

from benthic.forward import Int64, PenaltyInit, SamplingInput
from benthic.runner.noise import gumbel, index_terms
from benthic.runner.penalties import PenaltyState
from benthic.runner.sampling_plan import RandomBlock, SamplingPlan, plan_sampling

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """As LogprobRows, on the device."""

    chosen: torch.Tensor  # float32 [n]
    top_ids: torch.Tensor  # int32 [n, K]
    top: torch.Tensor  # float32 [n, K]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens, and log-probabilities of the plan's `logprob_rows`."""

    tokens: torch.Tensor  # int64 [S]
    logprobs: DeviceLogprobs | None


class Sampler:
    """Owns the penalty state."""

    def __init__(self, *, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._penalties = PenaltyState(num_slots, vocab_size, device)
        self._terms = index_terms(vocab_size, device)

    def plan(self, sampling: SamplingInput, inits: tuple[PenaltyInit, ...] = ()) -> SamplingPlan:
        """Host side: what is to be done, and the arrays (`plan.arrays`) that have to be uploaded for it."""
        starts = self._penalties.plan_starts(inits)
        rows: Int64 | None = None
        if sampling.penalty_rows is not None:
            rows = sampling.penalty_rows.astype("int64")
            rows[rows >= 0] = self._penalties.rows_of(sampling.penalty_rows[rows >= 0])
        plan = plan_sampling(sampling, self._vocab_size, rows)
        plan.arrays.update(starts)
        return plan

    def start_penalties(self, tensors: Tensors) -> None:
        """Carry out the step's PenaltyInits; also needed in a step that samples nothing."""
        self._penalties.start(tensors)

    def sample(
        self, logits: torch.Tensor, plan: SamplingPlan, tensors: Tensors, greedy: torch.Tensor | None = None
    ) -> Sampled:
        """Tokens for logits float32 [S, V], which it may change. `tensors` are `plan.arrays` uploaded.

        `greedy` int64 [S]: the raw argmax where somebody has it already.
        """
        raw = logits.index_select(0, tensors["logprob_rows"]) if plan.num_logprobs >= 0 else None
        if plan.has_bias:
            where = (tensors["bias_rows"], tensors["bias_tokens"])
            logits.index_put_(where, tensors["bias_added"], accumulate=True)
        self._penalize(logits, plan, tensors)
        if not plan.any_greedy:
            tokens = torch.empty(plan.num_rows, dtype=torch.int64, device=logits.device)
        elif greedy is not None and plan.keeps_logits:
            tokens = greedy.clone() if plan.random else greedy
        else:
            tokens = logits.argmax(-1)
        for block in plan.random:
            drawn = self._draw(logits, block, tensors)
            tokens.index_copy_(0, tensors[block.prefix + "rows"], drawn)
        for penalty in plan.penalties:
            rows = tensors[penalty.prefix + "rows"]
            self._penalties.count(tensors[penalty.prefix + "state"], tokens.index_select(0, rows))
        if raw is None:
            return Sampled(tokens, None)
        chosen = tokens.index_select(0, tensors["logprob_rows"])
        return Sampled(tokens, log_probabilities(raw, chosen, plan.num_logprobs))

    def _penalize(self, logits: torch.Tensor, plan: SamplingPlan, tensors: Tensors) -> None:
        for block in plan.penalties:
            if not block.used:
                continue
            rows = tensors[block.prefix + "rows"]
            part = logits.index_select(0, rows) if block.every_row is None else logits[block.every_row]
            strengths = (tensors.get(block.prefix + name) for name in ("repetition", "frequency", "presence"))
            self._penalties.apply(part, tensors[block.prefix + "state"], *strengths)
            if block.every_row is None:
                logits.index_copy_(0, rows, part)

    def _draw(self, logits: torch.Tensor, block: RandomBlock, tensors: Tensors) -> torch.Tensor:
        temperature = tensors[block.prefix + "temperature"][:, None]
        if block.every_row is None:
            scaled = logits.index_select(0, tensors[block.prefix + "rows"]).div_(temperature)
        else:
            scaled = logits[block.every_row] / temperature
        if block.max_top_k or block.top_p or block.min_p:
            scaled.masked_fill_(scaled < _thresholds(scaled, block, tensors)[:, None], float("-inf"))
        noise = gumbel(tensors[block.prefix + "keys"], self._terms)
        return scaled.add_(noise).argmax(-1)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> DeviceLogprobs:
    """Of tokens int64 [n] and of the `num_top` likeliest, under softmax(logits [n, V])."""
    norm = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - norm
    values, ids = logits.topk(num_top, dim=-1)
    return DeviceLogprobs(chosen[:, 0], ids.to(torch.int32), values - norm)


def _thresholds(scaled: torch.Tensor, block: RandomBlock, tensors: Tensors) -> torch.Tensor:
    """float32 [n]: the least scaled logit that each row keeps."""
    least = torch.full((scaled.shape[0],), float("-inf"), device=scaled.device)
    if block.max_top_k:
        rows = tensors[block.prefix + "top_k_rows"]
        best = scaled.index_select(0, rows).topk(block.max_top_k, dim=-1).values
        least.index_copy_(0, rows, best.gather(1, tensors[block.prefix + "top_k"][:, None] - 1)[:, 0])
    if block.top_p:
        rows = tensors[block.prefix + "top_p_rows"]
        ordered = _descending(scaled.index_select(0, rows))
        kth = ordered.gather(1, tensors[block.prefix + "top_p_k"][:, None] - 1)
        probs = ordered.masked_fill_(ordered < kth, float("-inf")).softmax(-1, dtype=torch.float64)
        before = probs.cumsum(-1) - probs
        kept = (before < tensors[block.prefix + "top_p"][:, None]).sum(-1, keepdim=True).clamp_(min=1)
        least.index_copy_(0, rows, ordered.gather(1, kept - 1)[:, 0])
    if block.min_p:
        rows = tensors[block.prefix + "min_p_rows"]
        floor = scaled.index_select(0, rows).amax(-1) + tensors[block.prefix + "min_p_log"]
        least.index_copy_(0, rows, torch.maximum(least.index_select(0, rows), floor))
    return least


def _descending(x: torch.Tensor) -> torch.Tensor:
    """Each row of float32 x [n, V], largest first."""
    if x.device.type == "cpu":  # torch sorts indices along, ten times slower than NumPy's vectorised sort of values
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values
