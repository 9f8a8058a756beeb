"""Random paged contexts, and grouped-query attention over them in float64: the judge of every attention kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows with `seq_lens` of context, the last `query_lens` tokens of it new; what the pool does not use is NaN."""

    q: torch.Tensor  # [T, H, d]
    k: torch.Tensor  # [T, G, d] of the new tokens, already in the pool too
    v: torch.Tensor
    kv: torch.Tensor  # [pages + 1, 2, page_size, G, d]
    page_table: torch.Tensor  # int32 [R, M]; NaN-free only where the row's pages are
    seq_lens: torch.Tensor  # int32 [R]
    cu_query_lens: torch.Tensor  # int32 [R + 1]
    slots: torch.Tensor  # int64 [T]
    expected: torch.Tensor  # float64 [T, H, d]
    scale: float
    max_query_len: int
    max_seq_len: int


def make_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Case:
    """A case with shuffled pages, q strided as a slice of a fused qkv projection is."""
    rng = torch.Generator().manual_seed(seed)
    pages_of = [-(-n // page_size) for n in seq_lens]
    num_pages = sum(pages_of) + 3
    order = torch.randperm(num_pages, generator=rng).tolist()
    kv = torch.full((num_pages + 1, 2, page_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    table = torch.zeros((len(seq_lens), max(pages_of) + 1), dtype=torch.int32)
    total = sum(query_lens)
    fused = torch.randn((total, heads + 2 * kv_heads, head_dim), generator=rng).to(dtype)
    q, k_new, v_new = fused.split([heads, kv_heads, kv_heads], dim=1)
    expected = torch.empty((total, heads, head_dim), dtype=torch.float64)
    slots, start, scale = [], 0, head_dim**-0.5
    for row, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        pages = torch.tensor([order.pop() for _ in range(pages_of[row])], dtype=torch.int64)
        table[row, : len(pages)] = pages.to(torch.int32)
        context = torch.randn((2, length, kv_heads, head_dim), generator=rng).to(dtype)
        context[0, length - new :] = k_new[start : start + new]
        context[1, length - new :] = v_new[start : start + new]
        where = pages.repeat_interleave(page_size)[:length] * page_size + torch.arange(length) % page_size
        kv[where // page_size, 0, where % page_size] = context[0]
        kv[where // page_size, 1, where % page_size] = context[1]
        slots.append(where[length - new :])
        expected[start : start + new] = _attend(q[start : start + new], context[0], context[1], scale)
        start += new
    return Case(
        q=fused.to(device)[:, :heads],
        k=fused.to(device)[:, heads : heads + kv_heads],
        v=fused.to(device)[:, heads + kv_heads :],
        kv=kv.to(device),
        page_table=table.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device),
        slots=torch.cat(slots).to(device),
        expected=expected.to(device),
        scale=scale,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of `dtype`."""
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    new, heads, _ = q.shape
    group = heads // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(heads):
        scores = q[:, head].double() @ k[:, head // group].double().T * scale
        seen = torch.ones(new, len(k), dtype=torch.bool).tril(len(k) - new)
        out[:, head] = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, head // group].double()
    return out
