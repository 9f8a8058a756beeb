"""`paged_decode` in Triton, in two stages.

Stage one: a program takes one row, one KV head (all its query heads) and one of SPLITS equal parts of the row's actual
length, and leaves a normalised partial result with its log-sum-exp (base 2). Stage two combines the parts; where the
row's other keys lie on other ranks (PART), `split_merge` does.
Limits: head_dim a power of two from 16 to 256, page size a power of two, contiguous last dimensions.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.split_merge.kernel import merge_splits
from benthic.kernels.tiles import Tiles, decode_tiles, num_splits

_LOG2_E = 1.4426950408889634


# the table's width and where a batch's rows start change from step to step: no new compilation for their alignment
@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"])
def _decode_kernel(
    q_ptr, kv_ptr, table_ptr, lens_ptr, part_ptr, lse_ptr, scale_log2,
    stride_qt, stride_qh, stride_page, stride_kv, stride_pos, stride_head, stride_table,
    stride_pt, stride_ph, stride_ps,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride_table and row * stride_pt may pass 2**31
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    seq_len = tl.load(lens_ptr + row)
    tiles = tl.cdiv(seq_len, BLOCK_N)
    per_split = tl.cdiv(tiles, SPLITS)
    first = split * per_split
    last = tl.minimum(first + per_split, tiles)  # first >= last for the parts that a short row leaves empty

    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, HEAD_DIM)
    keys = tl.arange(0, BLOCK_N)
    head_mask = heads < GROUP  # the dot wants 16 rows; heads past the group are padding
    q_rows = q_ptr + row * stride_qt + (kv_head * GROUP + heads)[:, None] * stride_qh
    q = tl.load(q_rows + dims[None, :], mask=head_mask[:, None], other=0.0)
    table = table_ptr + row * stride_table
    base = kv_ptr + kv_head * stride_head

    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, HEAD_DIM), tl.float32)
    for tile in tl.range(first, last):
        position = tile * BLOCK_N + keys
        valid = position < seq_len  # past the end lies another sequence's or no data: NaN there would spread
        if PAGE_SIZE >= BLOCK_N:  # a tile lies in one page: one table entry
            page = tl.load(table + tile * BLOCK_N // PAGE_SIZE).to(tl.int64)  # page * stride_page passes 2**31
            offset = (tile * BLOCK_N % PAGE_SIZE + keys).to(tl.int64)
            rows = page * stride_page + offset * stride_pos
        else:
            pages = tl.load(table + position // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
            rows = pages * stride_page + (position % PAGE_SIZE) * stride_pos
        k = tl.load(base + rows[:, None] + dims[None, :], mask=valid[:, None], other=0.0).to(q.dtype)
        v = tl.load(base + stride_kv + rows[:, None] + dims[None, :], mask=valid[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))  # finite: a tile before `last` has at least one valid key
        probs = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(probs, 1)
        acc = acc * shrink[:, None] + tl.dot(probs.to(q.dtype), v, input_precision="ieee")
        best = new_best

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    head = kv_head * GROUP + heads
    part = part_ptr + row * stride_pt + head[:, None] * stride_ph + split * stride_ps
    tl.store(part + dims[None, :], acc.to(part_ptr.dtype.element_ty), mask=head_mask[:, None])
    if SPLITS > 1 or PART:
        tl.store(lse_ptr + (row * num_heads + head) * SPLITS + split, lse, mask=head_mask)


@triton.jit
def _combine_kernel(
    part_ptr, lse_ptr, out_ptr, stride_ot, stride_oh, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    first = (row * num_heads + head) * SPLITS
    lse = tl.load(lse_ptr + first + splits)
    weights = tl.exp2(lse - tl.max(lse, 0))  # the first part is never empty, so the maximum is finite
    parts = tl.load(part_ptr + (first + splits)[:, None] * HEAD_DIM + dims[None, :])
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * stride_ot + head * stride_oh + dims, result.to(out_ptr.dtype.element_ty))


def paged_decode_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor,
    tiles: Tiles | None = None,
    splits: int | None = None,
    out_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.paged_decode.paged_decode`; `tiles` and `splits` override the table (tuning, tests).

    With `out_lse`, see `paged_decode_part`, whose `out` and `out_lse` are to be given.
    """
    batch, num_heads, head_dim = q.shape
    if batch == 0:
        return out
    assert kv.stride(-1) == out.stride(-1) == 1, "last dimensions are contiguous"
    q = q if q.stride(-1) == 1 else q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    num_kv_heads = kv.shape[3]
    group = num_heads // num_kv_heads
    tiles = tiles or decode_tiles(head_dim, q.element_size(), group, q.device)
    splits = splits or num_splits(batch, num_kv_heads, max_seq_len, q.device)
    if splits == 1 and out_lse is None:
        parts, lse, part_strides = out, out, (out.stride(0), out.stride(1), 0)
    else:
        parts = torch.empty((batch, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, num_heads, splits), dtype=torch.float32, device=q.device)
        part_strides = (parts.stride(0), parts.stride(1), parts.stride(2))
    _decode_kernel[(batch, num_kv_heads, splits)](
        q, kv, page_table, seq_lens, parts, lse, scale * _LOG2_E,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        page_table.stride(0), *part_strides,
        GROUP=group, BLOCK_H=tiles.rows, BLOCK_N=tiles.keys, HEAD_DIM=head_dim, PAGE_SIZE=kv.shape[2], SPLITS=splits,
        PART=out_lse is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if out_lse is not None:
        merge_splits(parts, lse, out, out_lse)
    elif splits > 1:
        _combine_kernel[(batch, num_heads)](
            parts, lse, out, out.stride(0), out.stride(1), HEAD_DIM=head_dim, SPLITS=splits, num_warps=4
        )
    return out
