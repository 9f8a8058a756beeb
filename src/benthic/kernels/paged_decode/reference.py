"""`paged_decode` in plain torch."""

import torch


def paged_decode_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `benthic.kernels.paged_decode.paged_decode`. Gathers each row's context; reads the lengths on the host."""
    group = q.shape[1] // kv.shape[3]
    for row, length in enumerate(seq_lens.tolist()):
        pages = page_table[row, : -(-length // kv.shape[2])].long()
        k, v = kv[pages].transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype).repeat_interleave(group, dim=2)
        scores = torch.einsum("hd,nhd->hn", q[row].float(), k.float()) * scale
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v.float()).to(out.dtype)
    return out
