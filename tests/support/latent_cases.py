"""Random paged latents, and absorbed attention over them in float64: the judge of the latent kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """Rows with `seq_lens` of context, the last `query_lens` tokens of it queries; unused entries of the pool are NaN.

    `selected` holds each query's positions in random order, at most K, -1 behind; `expected` is over these, `dense`
    over all positions up to the query's own.
    """

    q_latent: torch.Tensor  # [T, H, R]
    q_rope: torch.Tensor  # [T, H, P]
    latents: torch.Tensor  # [pages + 1, page_size, R + P], or uint8 records
    page_table: torch.Tensor  # int32 [rows, M]
    seq_lens: torch.Tensor  # int32 [rows]
    selected: torch.Tensor  # int32 [T, K]
    expected: torch.Tensor  # float64 [T, H, R]
    dense: torch.Tensor  # float64 [T, H, R]
    scale: float
    rank: int


def make_latent_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    heads: int,
    rank: int,
    rope_dim: int,
    page_size: int,
    topk: int,
    dtype: torch.dtype,
    device: torch.device,
    fp8: bool = False,
    seed: int = 0,
) -> LatentCase:
    """A case with shuffled pages; queries are strided, as slices of a wider product are."""
    rng = torch.Generator().manual_seed(seed)
    pages_of = [-(-n // page_size) for n in seq_lens]
    order = torch.randperm(sum(pages_of) + 3, generator=rng).tolist()
    pool, values = _pool(len(order) + 1, page_size, rank, rope_dim, dtype, fp8, rng)
    used = torch.zeros(pool.shape[:2], dtype=torch.bool)
    table = torch.zeros((len(seq_lens), max(pages_of) + 1), dtype=torch.int32)
    total = sum(query_lens)
    fused = torch.randn((total, heads, rank + rope_dim), generator=rng).to(dtype)
    selected = torch.full((total, topk), -1, dtype=torch.int32)
    expected = torch.empty((2, total, heads, rank), dtype=torch.float64, device=device)
    scale, token = (rank + rope_dim) ** -0.5, 0
    for row, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        pages = torch.tensor([order.pop() for _ in range(pages_of[row])])
        table[row, : len(pages)] = pages.to(torch.int32)
        where = pages.repeat_interleave(page_size)[:length], torch.arange(length) % page_size
        used[where] = True
        context = values[where].double().to(device)
        for seen in range(length - new + 1, length + 1):
            chosen = torch.randperm(seen, generator=rng)[:topk]
            selected[token, : len(chosen)] = chosen.to(torch.int32)
            query = fused[token].double().to(device)
            expected[0, token] = _attend(query, context[chosen.to(device)], scale, rank)
            expected[1, token] = _attend(query, context[:seen], scale, rank)
            token += 1
    pool[~used] = 0xFF if fp8 else float("nan")  # 0xff is NaN in e4m3, float32 and bfloat16
    return LatentCase(
        q_latent=fused.to(device)[..., :rank],
        q_rope=fused.to(device)[..., rank:],
        latents=pool.to(device),
        page_table=table.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        selected=selected.to(device),
        expected=expected[0],
        dense=expected[1],
        scale=scale,
        rank=rank,
    )


def _pool(
    pages: int, page_size: int, rank: int, rope_dim: int, dtype: torch.dtype, fp8: bool, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A full pool and the values [pages, page_size, R + P] that it holds, as kernels see them in `dtype`."""
    values = torch.randn((pages, page_size, rank + rope_dim), generator=rng)
    if not fp8:
        pool = values.to(dtype)
        return pool, pool.float()
    groups = -(-rank // 128)
    scales = torch.rand((pages, page_size, groups), generator=rng) * 0.01 + 0.001
    wide = scales.repeat_interleave(128, dim=-1)[..., :rank]
    codes = (values[..., :rank] / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    rope = values[..., rank:].to(torch.bfloat16)
    records = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8), rope.contiguous().view(torch.uint8)], -1)
    return records, torch.cat([(codes.float() * wide).to(dtype).float(), rope.float()], dim=-1)


def _attend(query: torch.Tensor, entries: torch.Tensor, scale: float, rank: int) -> torch.Tensor:
    return (query @ entries.T * scale).softmax(-1) @ entries[:, :rank]
