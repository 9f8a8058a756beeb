"""Attention of one new token a row over its paged context (split-KV grouped-query decode)."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.paged_decode.reference import paged_decode_part_reference, paged_decode_reference


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale · q · K) · V over the first seq_lens[b] tokens of row b's pages.

    q [B, H, head_dim]; kv [pages + 1, 2, page_size, G, head_dim] with H a multiple of G; page_table int32 [B, M];
    seq_lens int32 [B], at least 1, at most max_seq_len (which only shapes the launch). Returns out [B, H, head_dim].
    """
    check_attention_shapes(q, kv, page_table, seq_lens)
    out = torch.empty_like(q) if out is None else out
    if use_triton(q):
        from benthic.kernels.paged_decode.kernel import paged_decode_triton  # triton is optional

        return paged_decode_triton(q, kv, page_table, seq_lens, scale, max_seq_len, out)
    return paged_decode_reference(q, kv, page_table, seq_lens, scale, max_seq_len, out)


def paged_decode_part(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_decode` over some of each row's keys, to be merged with the results over its others.

    The tokens that stand here alone are counted in seq_lens and have pages in page_table; a row may have none. Returns
    out float32 [B, H, head_dim] and the logits' log-sum-exp, float32 [B, H], base e: 0 and -inf without a key.
    """
    check_attention_shapes(q, kv, page_table, seq_lens)
    if use_triton(q):
        from benthic.kernels.paged_decode.kernel import paged_decode_triton  # triton is optional

        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        paged_decode_triton(q, kv, page_table, seq_lens, scale, max_seq_len, out, out_lse=lse)
        return out, lse
    return paged_decode_part_reference(q, kv, page_table, seq_lens, scale)


def check_attention_shapes(q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Raise ValueError where heads, head_dim or rows don't fit together."""
    if q.dim() != 3 or kv.dim() != 5 or q.shape[2] != kv.shape[4] or q.shape[1] % kv.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}: [T, H, d], [pages, 2, page, G, d], G | H"
        )
    if page_table.dim() != 2 or seq_lens.shape != page_table.shape[:1]:
        raise ValueError(f"page_table {tuple(page_table.shape)} and seq_lens {tuple(seq_lens.shape)} differ in rows")
    if kv.shape[2] & (kv.shape[2] - 1):
        raise ValueError(f"page size {kv.shape[2]} is not a power of two")


__all__ = [
    "check_attention_shapes",
    "paged_decode",
    "paged_decode_part",
    "paged_decode_part_reference",
    "paged_decode_reference",
]
