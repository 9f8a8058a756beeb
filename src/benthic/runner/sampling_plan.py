"""What a step's sampling comes to, decided on the host: which rows need which work, and the arrays that work needs.

Every row list is known here, so nothing on the device has to be asked how many rows want something.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benthic.forward import Int64, SamplingInput
from benthic.runner.noise import row_keys

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it would overflow
BLOCK_ROWS = 64  # rows that sample together: bounds the [rows, V] temporaries
_PENALTIES = (("repetition", 1.0), ("frequency", 0.0), ("presence", 0.0))  # and what is no penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBlock:
    """Up to BLOCK_ROWS rows that draw. `prefix` names its arrays; rows of the filters count inside the block."""

    prefix: str
    every_row: slice | None  # the block is these rows of the batch, in order: no gather
    max_top_k: int  # largest k of rows with top-k alone; 0: none
    top_p: bool
    min_p: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyBlock:
    """Up to BLOCK_ROWS rows with penalties."""

    prefix: str
    every_row: slice | None
    used: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """The work of one step; `arrays` go to the device."""

    num_rows: int
    any_greedy: bool
    has_bias: bool
    random: tuple[RandomBlock, ...]
    penalties: tuple[PenaltyBlock, ...]
    num_logprobs: int  # K; -1: no row wants any
    logprob_rows: Int64
    arrays: dict[str, NDArray[Any]] = field(repr=False)

    @property
    def keeps_logits(self) -> bool:
        """Whether the greedy rows' tokens are the raw logits' argmax."""
        return not self.has_bias and not self.penalties


def plan_sampling(sampling: SamplingInput, vocab_size: int, penalty_rows: Int64 | None) -> SamplingPlan:
    """The plan for `sampling`. `penalty_rows` int64 [S]: rows of the penalty state, -1 where none."""
    arrays: dict[str, NDArray[Any]] = {}
    num_rows = len(sampling.temperature)
    random_rows = np.flatnonzero(sampling.temperature >= GREEDY_BELOW)
    random = tuple(
        _random_block(sampling, random_rows[start : start + BLOCK_ROWS], start, num_rows, vocab_size, arrays)
        for start in range(0, len(random_rows), BLOCK_ROWS)
    )
    if sampling.bias is not None and len(sampling.bias[0]):
        arrays["bias_rows"], arrays["bias_tokens"], arrays["bias_added"] = sampling.bias
    logprob_rows = np.zeros(0, dtype=np.int64)
    num_logprobs = -1
    if sampling.logprobs is not None and (sampling.logprobs >= 0).any():
        logprob_rows = np.flatnonzero(sampling.logprobs >= 0)
        num_logprobs = min(int(sampling.logprobs.max()), vocab_size)
        arrays["logprob_rows"] = logprob_rows
    if sampling.hidden is not None and len(sampling.hidden):
        arrays["hidden_rows"] = sampling.hidden
    return SamplingPlan(
        num_rows=num_rows,
        any_greedy=len(random_rows) < num_rows,
        has_bias="bias_rows" in arrays,
        random=random,
        penalties=_penalty_blocks(sampling, penalty_rows, arrays),
        num_logprobs=num_logprobs,
        logprob_rows=logprob_rows,
        arrays=arrays,
    )


def _random_block(
    sampling: SamplingInput,
    rows: Int64,
    start: int,
    num_rows: int,
    vocab_size: int,
    arrays: dict[str, NDArray[Any]],
) -> RandomBlock:
    prefix = f"random{start}."
    arrays[prefix + "rows"] = rows
    arrays[prefix + "temperature"] = sampling.temperature[rows]
    arrays[prefix + "keys"] = row_keys(sampling.seed[rows], sampling.choice[rows], sampling.position[rows])
    top_k = np.full(len(rows), vocab_size, dtype=np.int64)
    if sampling.top_k is not None:
        wanted = sampling.top_k[rows]
        top_k = np.where((wanted > 0) & (wanted < vocab_size), wanted, vocab_size).astype(np.int64)
    by_p = np.zeros(0, dtype=np.int64)
    if sampling.top_p is not None:
        by_p = np.flatnonzero(sampling.top_p[rows] < 1)
        arrays[prefix + "top_p_rows"] = by_p
        arrays[prefix + "top_p"] = sampling.top_p[rows][by_p]
        arrays[prefix + "top_p_k"] = top_k[by_p]
    only_k = top_k < vocab_size
    only_k[by_p] = False  # a row with both is cut in its sorted order
    by_k = np.flatnonzero(only_k)
    arrays[prefix + "top_k_rows"] = by_k
    arrays[prefix + "top_k"] = top_k[by_k]
    by_min = np.zeros(0, dtype=np.int64)
    if sampling.min_p is not None:
        by_min = np.flatnonzero(sampling.min_p[rows] > 0)
        arrays[prefix + "min_p_rows"] = by_min
        arrays[prefix + "min_p_log"] = np.log(sampling.min_p[rows][by_min]).astype(np.float32)
    return RandomBlock(
        prefix=prefix,
        every_row=slice(int(rows[0]), int(rows[-1]) + 1) if rows[-1] - rows[0] + 1 == len(rows) else None,
        max_top_k=int(top_k[by_k].max()) if len(by_k) else 0,
        top_p=len(by_p) > 0,
        min_p=len(by_min) > 0,
    )


def _penalty_blocks(
    sampling: SamplingInput, state_rows: Int64 | None, arrays: dict[str, NDArray[Any]]
) -> tuple[PenaltyBlock, ...]:
    if state_rows is None:
        return ()
    all_rows = np.flatnonzero(state_rows >= 0)
    blocks = []
    for start in range(0, len(all_rows), BLOCK_ROWS):
        rows, prefix = all_rows[start : start + BLOCK_ROWS], f"penalty{start}."
        arrays[prefix + "rows"], arrays[prefix + "state"] = rows, state_rows[rows]
        used = set()
        for name, off in _PENALTIES:
            strength = getattr(sampling, name)
            if strength is not None and (strength[rows] != off).any():
                arrays[prefix + name] = strength[rows]
                used.add(name)
        every = slice(int(rows[0]), int(rows[-1]) + 1) if rows[-1] - rows[0] + 1 == len(rows) else None
        blocks.append(PenaltyBlock(prefix=prefix, every_row=every, used=frozenset(used)))
    return tuple(blocks)
