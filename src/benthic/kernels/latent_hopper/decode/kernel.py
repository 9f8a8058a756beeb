"""`latent_decode` over selected positions; see `latent_hopper`."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from benthic.kernels.latent_hopper.gather.kernel import count_keys, find_positions, find_slots, gather
from benthic.kernels.tiles import next_power_of_two


@gluon.jit
def _load_query(base, offsets, inside, WIDTH: gl.constexpr, layout: gl.constexpr, shared: gl.constexpr):
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    rows = gl.load(base + offsets[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
    return gl.allocate_shared_memory(base.dtype.element_ty, [offsets.shape[0], WIDTH], shared, rows)


@gluon.jit
def _attend(
    q, q_rope, pool_ptr, stride, selected, table, first, last, end, scale_log2,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    score_layout: gl.constexpr, acc_layout: gl.constexpr, narrow: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = pool_ptr.dtype.element_ty
    c_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, RANK], dtype)
    r_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_H], dtype)
    c_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_N, RANK], c_shared)
    r_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROPE], r_shared)
    p_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_H], p_shared)
    rows: gl.constexpr = gl.SliceLayout(1, narrow)
    columns: gl.constexpr = gl.SliceLayout(0, score_layout)

    best = gl.full([BLOCK_H], -1.0e38, gl.float32, columns)
    totals = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, score_layout)  # summed over keys once, at the end
    acc = gl.full([RANK, BLOCK_H], 0.0, gl.float32, acc_layout)
    zero = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, score_layout)
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, score_layout))

    slots = find_slots(table, find_positions(selected, first, end, BLOCK_N, rows), PAGE_SIZE)
    gather(pool_ptr, slots, stride, c_tiles.index(first % 2), r_tiles.index(first % 2), RANK, ROPE, narrow)
    async_copy.commit_group()
    slots = find_slots(table, find_positions(selected, first + 1, end, BLOCK_N, rows), PAGE_SIZE)
    positions = find_positions(selected, first + 2, end, BLOCK_N, rows)
    for tile in range(first, last):
        async_copy.wait_group(0)
        fence_async_shared()  # what the copies wrote is for the tensor cores
        gl.thread_barrier()  # all have it, and none reads the other buffer any more
        c = c_tiles.index(tile % 2)
        scores = warpgroup_mma(c, q.permute([1, 0]), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma(r_tiles.index(tile % 2), q_rope.permute([1, 0]), scores, is_async=True)
        if tile + 1 < last:  # while the products run
            other = (tile + 1) % 2
            gather(pool_ptr, slots, stride, c_tiles.index(other), r_tiles.index(other), RANK, ROPE, narrow)
        async_copy.commit_group()
        slots = find_slots(table, positions, PAGE_SIZE)  # positions a tile ahead: no chain of two waits
        positions = find_positions(selected, tile + 3, end, BLOCK_N, rows)
        scores = warpgroup_mma_wait(0, deps=[scores]) * scale_log2
        scores = gl.where((tile * BLOCK_N + keys < end)[:, None], scores, float("-inf"))
        new_best = gl.maximum(best, gl.max(scores, 0))
        probs = gl.exp2(scores - new_best[None, :])
        shrink = gl.exp2(best - new_best)
        totals = totals * shrink[None, :] + probs
        best = new_best
        p_tile.store(probs.to(dtype))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, acc_layout))[None, :]
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(c.permute([1, 0]), p_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    return acc, best, gl.sum(totals, 0)


@gluon.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "selected_ptr", "lens_ptr"])
def _decode_kernel(
    q_ptr, q_rope_ptr, pool_ptr, table_ptr, lens_ptr, selected_ptr, part_ptr, lse_ptr, scale_log2, num_selected,
    stride_qt, stride_qh, stride_rt, stride_rh, stride, stride_table, stride_selected, stride_pt, stride_ph, stride_ps,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    across: gl.constexpr = warps // 4
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, across], instr_shape=[16, BLOCK_H // across, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, BLOCK_H, 16]
    )
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])

    row = gl.program_id(0).to(gl.int64)  # row * stride passes 2**31
    split = gl.program_id(2)
    table = table_ptr + row * stride_table
    selected = selected_ptr + row * stride_selected
    bound = gl.minimum(gl.load(lens_ptr + row), num_selected)
    if PART:
        bound = gl.maximum(bound, 1)  # of a row without a token here the first entry is -1 too
    end = count_keys(selected, bound, BLOCK_K)
    tiles = (end + BLOCK_N - 1) // BLOCK_N
    per_split = (tiles + SPLITS - 1) // SPLITS
    first = split * per_split
    last = gl.minimum(first + per_split, tiles)

    columns: gl.constexpr = gl.SliceLayout(0, score_layout)
    block = gl.program_id(1) * BLOCK_H
    head = block + gl.arange(0, BLOCK_H, layout=columns)
    lse_pointers = lse_ptr + (row * HEADS + head) * SPLITS + split
    if first >= last:  # a short row leaves parts empty: their weight is 0, their result stays unwritten
        gl.store(lse_pointers, gl.full([BLOCK_H], float("-inf"), gl.float32, columns), mask=head < HEADS)
    else:
        dtype: gl.constexpr = pool_ptr.dtype.element_ty
        q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, RANK], dtype)
        r_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, ROPE], dtype)
        q_head = block + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, wide))
        r_head = block + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, narrow))
        q = _load_query(q_ptr, row * stride_qt + q_head * stride_qh, q_head < HEADS, RANK, wide, q_shared)
        q_rope = _load_query(q_rope_ptr, row * stride_rt + r_head * stride_rh, r_head < HEADS, ROPE, narrow, r_shared)
        acc, best, total = _attend(
            q, q_rope, pool_ptr, stride, selected, table, first, last, end, scale_log2,
            BLOCK_H, BLOCK_N, RANK, ROPE, PAGE_SIZE, score_layout, acc_layout, narrow,
        )  # fmt: skip
        acc_columns: gl.constexpr = gl.SliceLayout(0, acc_layout)
        acc = acc / gl.convert_layout(total, acc_columns)[None, :]
        out_head = block + gl.arange(0, BLOCK_H, layout=acc_columns)
        dims = gl.arange(0, RANK, layout=gl.SliceLayout(1, acc_layout))
        out_rows = row * stride_pt + out_head * stride_ph + split * stride_ps
        pointers = part_ptr + out_rows[None, :] + dims[:, None]
        gl.store(pointers, acc.to(part_ptr.dtype.element_ty), mask=(out_head < HEADS)[None, :] & (dims >= 0)[:, None])
        if SPLITS > 1 or PART:
            gl.store(lse_pointers, best + gl.log2(total), mask=head < HEADS)


def decode_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    selected: torch.Tensor,
    scale_log2: float,
    parts: torch.Tensor,
    part_strides: tuple[int, int, int],
    lse: torch.Tensor,
    *,
    splits: int,
    rows: int,
    part: bool,
) -> None:
    """Stage one of `latent_decode` for [D, H, R] queries, `rows` heads a program, in `splits` parts.

    The normalised parts go to `parts` (strides of row, head and split), their log-sum-exp (base 2) to `lse`; where the
    row's other keys lie elsewhere (`part`), of one split too, and a row may have no token or no selected one.
    """
    batch, num_heads, rank = q_latent.shape
    _decode_kernel[(batch, -(-num_heads // rows), splits)](
        q_latent, q_rope, latents, page_table, seq_lens, selected, parts, lse, scale_log2, selected.shape[1],
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), latents.stride(1),
        page_table.stride(0), selected.stride(0), *part_strides,
        HEADS=num_heads, BLOCK_H=rows, BLOCK_N=64, RANK=rank, ROPE=q_rope.shape[2], PAGE_SIZE=latents.shape[1],
        BLOCK_K=max(2048, next_power_of_two(selected.shape[1])), SPLITS=splits, PART=part, num_warps=8,
    )  # fmt: skip
