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
    for row, length in enumerate(seq_lens.tolist()):
        scores, v = _row(q[row], kv, page_table[row], length, scale)
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v).to(out.dtype)
    return out


def paged_decode_part_reference(
    q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `benthic.kernels.paged_decode.paged_decode_part`. Row by row, as above."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            scores, v = _row(q[row], kv, page_table[row], length, scale)
            out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
            lse[row] = scores.logsumexp(-1)
    return out, lse


def _row(
    q: torch.Tensor, kv: torch.Tensor, pages: torch.Tensor, length: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [H, length] of one row's query, and its values [length, H, d]; both float32."""
    context = kv[pages[: -(-length // kv.shape[2])].long()].transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype)
    k, v = context.repeat_interleave(q.shape[0] // kv.shape[3], dim=2).float()
    return torch.einsum("hd,nhd->hn", q.float(), k) * scale, v
