"""Batches for layers that look only at whose rows they have."""

import torch

from benthic.forward import ForwardBatch, RankBatch
from benthic.parallel.cp_split import RankStep

_ARRAYS = (
    "gather_rows", "work_slots", "context_pages", "context_from", "context_to", "write_rows", "write_slots",
    "decode_table", "decode_lens",
)  # fmt: skip


def moe_batch(step: RankStep | None) -> ForwardBatch:
    """A batch of the step's rows, without tokens, positions or pages; None: of rows that every rank has."""
    ranks = None
    if step is not None:
        tensors = {name: torch.from_numpy(getattr(step, name)) for name in _ARRAYS}
        ranks = RankBatch(step=step, max_decode_len=0, max_prefill_len=0, **tensors)
    nothing, table = torch.zeros(0, dtype=torch.int64), torch.zeros((0, 1), dtype=torch.int32)
    return ForwardBatch(
        num_tokens=0 if step is None else len(step.own_rows),
        num_decode=0 if step is None else step.num_decode,
        max_seq_len=0,
        max_query_len=0,
        input_ids=nothing,
        positions=nothing,
        kv_slots=nothing,
        seq_lens=nothing.int(),
        page_table=table,
        cu_query_lens=torch.zeros(1, dtype=torch.int32),
        ranks=ranks,
    )
