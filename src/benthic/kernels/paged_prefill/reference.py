"""`paged_prefill` in plain torch."""

import torch


def paged_prefill_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `benthic.kernels.paged_prefill.paged_prefill`. Gathers each row's context; reads the lengths on the host."""
    group = q.shape[1] // kv.shape[3]
    starts = cu_query_lens.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        pages = page_table[row, : -(-length // kv.shape[2])].long()
        k, v = kv[pages].transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype).repeat_interleave(group, dim=2)
        scores = torch.einsum("thd,nhd->htn", q[first:last].float(), k.float()) * scale
        positions = torch.arange(length - (last - first), length, device=q.device)
        hidden = torch.arange(length, device=q.device)[None, :] > positions[:, None]
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("htn,nhd->thd", probs, v.float()).to(out.dtype)
    return out
