"""Causal attention of prefill chunks over their paged context, the chunk's own tokens included."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.paged_decode import check_attention_shapes
from benthic.kernels.paged_prefill.reference import paged_prefill_reference


def paged_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row p's tokens are its last ones: token i of n sees positions 0 … seq_lens[p] - n + i.

    q [T, H, head_dim], the rows' tokens one after another; kv [pages + 1, 2, page_size, G, head_dim], new K, V written;
    page_table int32 [P, M]; seq_lens int32 [P]; cu_query_lens int32 [P + 1] from 0; max_query_len bounds a row's tokens
    (it only shapes the launch). Returns out [T, H, head_dim].
    """
    check_attention_shapes(q, kv, page_table, seq_lens)
    if cu_query_lens.shape != (seq_lens.shape[0] + 1,):
        raise ValueError(f"cu_query_lens {tuple(cu_query_lens.shape)} does not fit {seq_lens.shape[0]} rows")
    out = torch.empty_like(q) if out is None else out
    if use_triton(q):
        from benthic.kernels.paged_prefill.kernel import paged_prefill_triton  # triton is optional

        return paged_prefill_triton(q, kv, page_table, seq_lens, cu_query_lens, scale, max_query_len, out)
    return paged_prefill_reference(q, kv, page_table, seq_lens, cu_query_lens, scale, max_query_len, out)


__all__ = ["paged_prefill", "paged_prefill_reference"]
