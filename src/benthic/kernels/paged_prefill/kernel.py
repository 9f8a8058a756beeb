"""`paged_prefill` in Triton.

A program takes one prefill row, one KV head and a tile of query rows, where a query row is (token, head of the group):
so a tile is full whatever the group is, and K and V are read once for the whole group. Tiles that every query row sees
run without a mask, the few on the diagonal with one. The heaviest tiles start first.
Limits: head_dim a power of two from 16 to 256, page size a power of two, contiguous last dimensions.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.tiles import Tiles, prefill_tiles

_LOG2_E = 1.4426950408889634


@triton.jit
def _attend_tiles(
    q, acc, best, total, base, table, stride_page, stride_kv, stride_pos, scale_log2, first, last, positions, seq_len,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    for tile in tl.range(first, last):
        key_pos = tile * BLOCK_N + keys
        if PAGE_SIZE >= BLOCK_N:  # a tile lies in one page: one table entry
            page = tl.load(table + tile * BLOCK_N // PAGE_SIZE).to(tl.int64)  # page * stride_page passes 2**31
            rows = page * stride_page + (tile * BLOCK_N % PAGE_SIZE + keys).to(tl.int64) * stride_pos
        elif MASKED:  # the table may end inside the tile
            pages = tl.load(table + key_pos // PAGE_SIZE, mask=key_pos < seq_len, other=0).to(tl.int64)
            rows = pages * stride_page + (key_pos % PAGE_SIZE) * stride_pos
        else:
            pages = tl.load(table + key_pos // PAGE_SIZE).to(tl.int64)
            rows = pages * stride_page + (key_pos % PAGE_SIZE) * stride_pos
        pointers = base + rows[:, None] + dims[None, :]
        if MASKED:  # rows past the end hold anything; NaN there would spread through 0 * NaN
            k = tl.load(pointers, mask=(key_pos < seq_len)[:, None], other=0.0).to(q.dtype)
            v = tl.load(pointers + stride_kv, mask=(key_pos < seq_len)[:, None], other=0.0).to(q.dtype)
        else:
            k = tl.load(pointers).to(q.dtype)
            v = tl.load(pointers + stride_kv).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(key_pos[None, :] <= positions[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        probs = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(probs, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(probs.to(q.dtype), v, acc, input_precision="ieee")
        best = new_best
    return acc, best, total


# the table's width and where a batch's rows start change from step to step: no new compilation for their alignment
@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "cu_ptr"])
def _prefill_kernel(
    q_ptr, kv_ptr, table_ptr, lens_ptr, cu_ptr, out_ptr, scale_log2,
    stride_qt, stride_qh, stride_page, stride_kv, stride_pos, stride_head, stride_table, stride_ot, stride_oh,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tokens see most keys: start them first
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(cu_ptr + row).to(tl.int64)  # (start + token) * stride_qt passes 2**31 in long chunks
    query_len = (tl.load(cu_ptr + row + 1) - start).to(tl.int32)
    if block * BLOCK_M >= query_len * GROUP:  # the grid is made for the longest row
        return
    seq_len = tl.load(lens_ptr + row)
    context = seq_len - query_len

    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = index // GROUP
    head = kv_head * GROUP + index % GROUP
    dims = tl.arange(0, HEAD_DIM)
    inside = token < query_len  # the row's last tile is rarely full
    q_rows = q_ptr + (start + token)[:, None] * stride_qt + head[:, None] * stride_qh
    q = tl.load(q_rows + dims[None, :], mask=inside[:, None], other=0.0)
    positions = context + token
    first_position = context + block * BLOCK_M // GROUP
    last_position = tl.minimum(context + (block * BLOCK_M + BLOCK_M - 1) // GROUP, seq_len - 1)
    full = (first_position + 1) // BLOCK_N  # tiles that even the first query row sees whole
    end = last_position // BLOCK_N + 1

    base = kv_ptr + kv_head * stride_head
    table = table_ptr + row.to(tl.int64) * stride_table
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    acc, best, total = _attend_tiles(
        q, acc, best, total, base, table, stride_page, stride_kv, stride_pos, scale_log2, 0, full, positions, seq_len,
        False, BLOCK_N, HEAD_DIM, PAGE_SIZE,
    )  # fmt: skip
    acc, best, total = _attend_tiles(
        q, acc, best, total, base, table, stride_page, stride_kv, stride_pos, scale_log2, full, end, positions, seq_len,
        True, BLOCK_N, HEAD_DIM, PAGE_SIZE,
    )  # fmt: skip
    out_rows = out_ptr + (start + token)[:, None] * stride_ot + head[:, None] * stride_oh
    tl.store(out_rows + dims[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


def paged_prefill_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    out: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.paged_prefill.paged_prefill`; `tiles` overrides the table (tuning, tests)."""
    num_tokens, num_heads, head_dim = q.shape
    rows = seq_lens.shape[0]
    if num_tokens == 0 or rows == 0:
        return out
    assert kv.stride(-1) == out.stride(-1) == 1, "last dimensions are contiguous"
    q = q if q.stride(-1) == 1 else q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    num_kv_heads = kv.shape[3]
    group = num_heads // num_kv_heads
    tiles = tiles or prefill_tiles(head_dim, q.element_size(), q.device)
    _prefill_kernel[(triton.cdiv(max_query_len * group, tiles.rows), num_kv_heads, rows)](
        q, kv, page_table, seq_lens, cu_query_lens, out, scale * _LOG2_E,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        page_table.stride(0), out.stride(0), out.stride(1),
        GROUP=group, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, HEAD_DIM=head_dim, PAGE_SIZE=kv.shape[2],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
