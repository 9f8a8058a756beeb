"""Steps that warm a runner up: they compute on the scratch page and the scratch slot, and so touch nobody's state."""

import numpy as np

from benthic.common.layout import ceil_div
from benthic.forward import SamplingInput, StepInput
from benthic.runner.graphs import RunnerShape

_FEW_TOKENS = 16  # of a prefill that is there for its context, not for its size; more where graphs take such


def warmup_steps(
    shape: RunnerShape, chunk_tokens: int, contexts: tuple[int, ...] = (), eager_tokens: int = 1
) -> tuple[StepInput, ...]:
    """A prefill of a whole chunk, and decode steps of every number of rows that brings other kernels with it.

    `contexts`: lengths in tokens past which a model runs other kernels. On a GPU, where kernels are compiled when they
    first run, prefill and decode then meet each side of them. Steps of fewer than `eager_tokens` tokens run in graphs,
    which have been warmed up already.
    """
    if shape.device.type != "cuda":
        return scratch_prefill(shape, chunk_tokens), scratch_decode(shape, 1)
    rows = [1 << i for i in range(shape.max_running.bit_length())]  # each halves the parts that a context is cut into
    few = max(_FEW_TOKENS, eager_tokens)
    steps = [scratch_prefill(shape, chunk_tokens), *(scratch_decode(shape, n) for n in rows)]
    for limit in contexts:
        below = min(limit, shape.max_seq_len)
        steps.append(scratch_prefill(shape, min(chunk_tokens, below)))
        steps += [scratch_prefill(shape, min(few, below), num_decode=n) for n in rows]
        if limit < shape.max_seq_len:
            ends = min(shape.max_seq_len, limit + chunk_tokens)
            steps.append(scratch_prefill(shape, chunk_tokens, first=ends - chunk_tokens))
            ends = min(shape.max_seq_len, limit + few)
            steps += [scratch_prefill(shape, min(few, ends), first=max(0, ends - few), num_decode=n) for n in rows]
    return tuple(steps)


def scratch_prefill(shape: RunnerShape, num_tokens: int, *, first: int = 0, num_decode: int = 0) -> StepInput:
    """A prefill of `num_tokens` tokens from position `first` on, beside decode rows with a context of one token.

    The last token is sampled with filters on.
    """
    span = np.concatenate([np.zeros(num_decode, np.int64), np.arange(first, first + num_tokens, dtype=np.int64)])
    seq_lens = np.array([1] * num_decode + [first + num_tokens], dtype=np.int32)
    slots = np.full(num_decode + 1, shape.scratch_slot, dtype=np.int64)
    sampled = num_decode + 1
    return StepInput(
        tick=0,
        num_decode=num_decode,
        query_lens=np.array([num_tokens], np.int32),
        token_ids=np.zeros(num_decode + num_tokens, dtype=np.int32),
        positions=span,
        kv_slots=shape.num_pages * shape.page_size + span % shape.page_size,
        seq_lens=seq_lens,
        page_table=np.full((sampled, ceil_div(first + num_tokens, shape.page_size)), shape.num_pages, dtype=np.int32),
        state_slots=slots,
        sample_rows=np.array([*range(num_decode), num_decode + num_tokens - 1], dtype=np.int64),
        sample_slots=slots,
        sampling=SamplingInput(
            temperature=np.ones(sampled, np.float32),
            seed=np.zeros(sampled, np.int64),
            choice=np.zeros(sampled, np.int64),
            position=seq_lens.astype(np.int64),
            top_p=np.full(sampled, 0.9, np.float32),
            min_p=np.full(sampled, 0.01, np.float32),
        ),
    )


def scratch_decode(shape: RunnerShape, num_rows: int) -> StepInput:
    """Greedy decode rows with a context of one token."""
    zeros, slots = np.zeros(num_rows, dtype=np.int64), np.full(num_rows, shape.scratch_slot, dtype=np.int64)
    return StepInput(
        tick=0,
        num_decode=num_rows,
        query_lens=np.zeros(0, np.int32),
        token_ids=np.zeros(num_rows, dtype=np.int32),
        positions=zeros,
        kv_slots=np.full(num_rows, shape.num_pages * shape.page_size, dtype=np.int64),
        seq_lens=np.ones(num_rows, dtype=np.int32),
        page_table=np.full((num_rows, 1), shape.num_pages, dtype=np.int32),
        state_slots=slots,
        sample_rows=np.arange(num_rows, dtype=np.int64),
        sample_slots=slots,
        sampling=SamplingInput(
            temperature=np.zeros(num_rows, np.float32), seed=zeros, choice=zeros, position=zeros + 1
        ),
    )
