"""From a plan to the runner's input: numpy over slots, no loop over tokens or decode rows."""

import numpy as np

from benthic.engine.plan import PrefillChunk, StepPlan
from benthic.engine.rows import Rows
from benthic.forward import Float32, Int32, Int64, PenaltyInit, SamplingInput, StepInput

_NEG_INF = np.float32(-np.inf)


def build_step(plan: StepPlan, rows: Rows) -> StepInput:
    """The step's arrays. Reads the rows as they are before `launched`.

    The arrays are copies, later changes don't reach them.
    """
    p = rows.page_size
    slots = plan.decode_slots
    starts = rows.computed[slots]
    positions, kv_slots, token_ids = [starts], [_kv_slots(rows, slots, starts, p)], [np.zeros(len(slots), np.int32)]
    for chunk in plan.chunks:
        span = np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int64)
        positions.append(span)
        kv_slots.append(rows.table[chunk.slot, span // p].astype(np.int64) * p + span % p)
        token_ids.append(chunk.request.tokens[chunk.start : chunk.start + chunk.count])
    query_lens = np.array([c.count for c in plan.chunks], np.int32)
    all_slots = np.concatenate([slots, np.array([c.slot for c in plan.chunks], np.int64)])
    ends = np.array([c.start + c.count for c in plan.chunks], np.int64)
    seq_lens = np.concatenate([starts + 1, ends])
    num_pages = int(-(-int(seq_lens.max()) // p))
    first_rows = len(slots) + np.concatenate([[0], np.cumsum(query_lens)])
    sampled = [i for i, c in enumerate(plan.chunks) if c.samples]
    sample_rows = np.concatenate([np.arange(len(slots), dtype=np.int64), first_rows[1:][sampled] - 1])
    sample_positions = np.concatenate([starts + 1, ends[sampled]])
    table = rows.table[all_slots, :num_pages]
    return StepInput(
        tick=plan.tick,
        num_decode=len(slots),
        query_lens=query_lens,
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        kv_slots=np.concatenate(kv_slots),
        seq_lens=seq_lens.astype(np.int32),
        page_table=table,
        state_slots=all_slots,
        sample_rows=sample_rows.astype(np.int64),
        sample_slots=plan.sample_slots,
        sampling=_sampling(plan, rows, sample_positions),
        penalty_inits=tuple(_penalty_init(c) for c in plan.chunks if c.first and rows.penalised[c.slot]),
        prompt_logprobs=_prompt_logprobs(plan.chunks, first_rows),
    )


def _kv_slots(rows: Rows, slots: Int64, positions: Int64, page_size: int) -> Int64:
    pages = rows.table[slots, positions // page_size].astype(np.int64)
    return pages * page_size + positions % page_size


def _penalty_init(chunk: PrefillChunk) -> PenaltyInit:
    request = chunk.request
    return PenaltyInit(
        slot=chunk.slot, prompt=request.tokens[: request.prompt_len], output=request.tokens[request.prompt_len :]
    )


def _prompt_logprobs(chunks: tuple[PrefillChunk, ...], first_rows: Int64) -> tuple[tuple[int, int, int, Int32], ...]:
    wanted = []
    for i, c in enumerate(chunks):
        if c.logprob_rows:
            first = int(first_rows[i]) + c.logprob_start - c.start
            tokens = c.request.tokens[c.logprob_start + 1 : c.logprob_start + 1 + c.logprob_rows]
            wanted.append((first, c.logprob_rows, c.request.params.prompt_logprobs or 0, tokens))
    return tuple(wanted)


def _sampling(plan: StepPlan, rows: Rows, positions: Int64) -> SamplingInput:
    slots = plan.sample_slots
    penalised = rows.penalised[slots]
    any_penalty = bool(penalised.any())
    return SamplingInput(
        temperature=rows.temperature[slots],
        seed=rows.seed[slots],
        choice=rows.choice[slots],
        position=positions,
        top_k=_if(rows.top_k[slots], 0),
        top_p=_if(rows.top_p[slots], 1),
        min_p=_if(rows.min_p[slots], 0),
        penalty_rows=np.where(penalised, slots, -1).astype(np.int32) if any_penalty else None,
        presence=rows.presence[slots] if any_penalty else None,
        frequency=rows.frequency[slots] if any_penalty else None,
        repetition=rows.repetition[slots] if any_penalty else None,
        bias=_bias(slots, rows, positions),
        logprobs=_if(rows.logprobs[slots], -1),
        hidden=np.flatnonzero(plan.sample_hidden) if plan.sample_hidden.any() else None,
    )


def _if(values: np.ndarray, off: float) -> np.ndarray | None:
    return values if (values != off).any() else None


def _bias(slots: Int64, rows: Rows, positions: Int64) -> tuple[Int64, Int64, Float32] | None:
    """(row, token, added) triples of logit_bias, and bans of the end tokens before min_tokens."""
    row_idx: list[Int64] = []
    tokens: list[Int64] = []
    values: list[Float32] = []
    for i in np.flatnonzero(rows.biased[slots]).tolist():
        slot = int(slots[i])
        request = rows.requests[slot]
        assert request is not None
        if request.bias_tokens is not None and request.bias_values is not None:
            tokens.append(request.bias_tokens)
            values.append(request.bias_values)
            row_idx.append(np.full(len(request.bias_tokens), i, np.int64))
        if positions[i] < rows.min_length[slot] and len(request.stop_ids):
            tokens.append(request.stop_ids.astype(np.int64))
            values.append(np.full(len(request.stop_ids), _NEG_INF))
            row_idx.append(np.full(len(request.stop_ids), i, np.int64))
    if not row_idx:
        return None
    return np.concatenate(row_idx), np.concatenate(tokens), np.concatenate(values)
