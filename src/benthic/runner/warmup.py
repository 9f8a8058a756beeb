"""Steps that warm a runner up: they compute on the scratch page and the scratch slot, and so touch nobody's state."""

import numpy as np

from benthic.common.layout import ceil_div
from benthic.forward import SamplingInput, StepInput
from benthic.runner.graphs import RunnerShape


def warmup_steps(shape: RunnerShape, chunk_tokens: int) -> tuple[StepInput, ...]:
    """A prefill of a whole chunk, and decode steps of every number of rows that brings other kernels with it."""
    rows = [1]
    if shape.device.type == "cuda":  # each power of two halves the parts that a context is cut into
        rows = [1 << i for i in range(shape.max_running.bit_length())]
    return (scratch_prefill(shape, chunk_tokens), *(scratch_decode(shape, n) for n in rows))


def scratch_prefill(shape: RunnerShape, num_tokens: int) -> StepInput:
    """A prefill of `num_tokens` tokens whose last one is sampled with filters on."""
    span = np.arange(num_tokens, dtype=np.int64)
    return StepInput(
        tick=0,
        num_decode=0,
        query_lens=np.array([num_tokens], np.int32),
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=span,
        kv_slots=shape.num_pages * shape.page_size + span % shape.page_size,
        seq_lens=np.array([num_tokens], dtype=np.int32),
        page_table=np.full((1, ceil_div(num_tokens, shape.page_size)), shape.num_pages, dtype=np.int32),
        state_slots=np.array([shape.scratch_slot], dtype=np.int64),
        sample_rows=np.array([num_tokens - 1], dtype=np.int64),
        sample_slots=np.array([shape.scratch_slot], dtype=np.int64),
        sampling=SamplingInput(
            temperature=np.ones(1, np.float32),
            seed=np.zeros(1, np.int64),
            choice=np.zeros(1, np.int64),
            position=np.full(1, num_tokens, np.int64),
            top_p=np.array([0.9], np.float32),
            min_p=np.array([0.01], np.float32),
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
