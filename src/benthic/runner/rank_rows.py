"""A step for one of several context-parallel ranks: its rows on the way in, the sampled rows on the way out."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.forward import ForwardBatch, LayerHooks, RankBatch, StepInput
from benthic.parallel.collectives import Collectives
from benthic.parallel.cp_split import RankStep, split_step

Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, torch.Tensor]

_ON_DEVICE = (
    "gather_rows", "work_slots", "context_pages", "context_from", "context_to", "write_rows", "write_slots",
    "decode_table", "decode_lens",
)  # fmt: skip


def split(step: StepInput, page_size: int, group: Collectives) -> RankStep:
    """What this rank computes of the step."""
    return split_step(
        num_decode=step.num_decode,
        query_lens=step.query_lens,
        seq_lens=step.seq_lens,
        page_table=step.page_table,
        page_size=page_size,
        rank=group.rank,
        size=group.size,
    )


def rank_arrays(step: StepInput, part: RankStep, rows: int, page_size: int) -> Arrays:
    """The host arrays of the rank's forward, padded to `rows` rows, under the names that `rank_batch` reads."""
    num_decode, own = step.num_decode, part.own_rows
    table = np.zeros((num_decode + len(part.work_table), part.work_table.shape[1]), np.int32)
    table[num_decode:] = part.work_table
    cu_query_lens = np.zeros(len(part.query_lens) + 1, dtype=np.int32)
    np.cumsum(part.query_lens, out=cu_query_lens[1:])
    arrays: Arrays = {
        "token_ids": padded(step.token_ids[own], rows, 0),
        "positions": padded(step.positions[own], rows, 0),
        "kv_slots": padded(part.work_slots[own], rows, part.work_pages * page_size),
        "seq_lens": np.concatenate([step.seq_lens[:num_decode], part.seq_lens]),
        "page_table": table,
        "cu_query_lens": cu_query_lens,
    }
    arrays.update((f"ranks.{name}", getattr(part, name)) for name in _ON_DEVICE)
    return arrays


def rank_batch(
    step: StepInput, part: RankStep, tensors: Tensors, input_ids: torch.Tensor, hooks: LayerHooks | None
) -> ForwardBatch:
    """The batch over the uploaded arrays; `input_ids` with the decode rows' tokens in place."""
    num_decode = step.num_decode
    lens = np.concatenate([step.seq_lens[:num_decode], part.seq_lens])
    return ForwardBatch(
        num_tokens=len(part.own_rows),
        num_decode=num_decode,
        max_seq_len=int(step.seq_lens.max()),
        max_query_len=int(part.query_lens.max()) if len(part.query_lens) else 0,
        input_ids=input_ids,
        positions=tensors["positions"],
        kv_slots=tensors["kv_slots"],
        seq_lens=tensors["seq_lens"],
        page_table=tensors["page_table"],
        cu_query_lens=tensors["cu_query_lens"],
        query_lens_host=tuple(part.query_lens.tolist()),
        seq_lens_host=tuple(lens.tolist()),
        hooks=hooks,
        ranks=RankBatch(
            step=part,
            max_decode_len=int(step.seq_lens[:num_decode].max()) if num_decode else 0,
            max_prefill_len=int(step.seq_lens[num_decode:].max()) if len(step.query_lens) else 0,
            **{name: tensors[f"ranks.{name}"] for name in _ON_DEVICE},
        ),
    )


def rows_for_all(hidden: torch.Tensor, part: RankStep, rows: NDArray[np.int64], group: Collectives) -> torch.Tensor:
    """Rows of the step's T (int64 [S]) out of the ranks' hidden states [N, D] -> [S, D] on every rank.

    Each row comes from the one rank that computed it, decode rows from the first: all others add zeros.
    """
    own = part.own_index[rows]
    given = np.flatnonzero((own >= 0) & ((rows >= part.num_decode) | (group.rank == 0)))
    wanted = hidden.new_zeros((len(rows), hidden.shape[1]))
    if len(given):
        at = torch.from_numpy(given).to(hidden.device)
        wanted.index_copy_(0, at, hidden.index_select(0, torch.from_numpy(own[given]).to(hidden.device)))
    return group.all_reduce(wanted)


def padded(array: NDArray[Any], rows: int, value: int) -> NDArray[Any]:
    """`array` with `value` behind it, up to `rows`."""
    if rows <= len(array):
        return array
    return np.concatenate([array, np.full(rows - len(array), value, array.dtype)])
