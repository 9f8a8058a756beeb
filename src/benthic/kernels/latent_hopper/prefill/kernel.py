"""`latent_prefill` over selected positions with 64 heads a program; see `latent_hopper`.

A few warps look up slots and gather latents, two tiles ahead at most; the others only multiply. So neither a look-up
nor the issue of some 4,600 copies a tile stands between two products. A program stays for many rows (grid: one an SM),
so that the next row's first tiles arrive while the last row's result is written.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from benthic.kernels.latent_hopper.gather.kernel import (
    barrier,
    fetch,
    find_positions,
    find_row,
    find_slots,
    load_query,
)
from benthic.kernels.tiles import next_power_of_two, num_sms

_HEADS = 64  # of a program
_BUFFERS = gl.constexpr(2)
_FEEDERS = gl.constexpr(4)  # warps that gather
_FEEDER_REGISTERS = gl.constexpr(64)  # a thread; the others share the rest


@gluon.jit
def _feed(
    pool_ptr, table, selected_ptr, num_items, num_rows, first_position, num_selected, stride, stride_selected,
    c_tiles, r_tiles, ready, free,
    HEAD_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    keys: gl.constexpr = gl.SliceLayout(1, layout)
    filled = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _row, _block, selected, end = find_row(
            item, selected_ptr, num_rows, first_position, num_selected, stride_selected, HEAD_BLOCKS, BLOCK_K
        )
        slots = find_slots(table, find_positions(selected, 0, end, BLOCK_N, keys), PAGE_SIZE)
        positions = find_positions(selected, 1, end, BLOCK_N, keys)
        for tile in range((end + BLOCK_N - 1) // BLOCK_N):
            buffer = filled % _BUFFERS
            mbarrier.wait(free.index(buffer), (filled // _BUFFERS & 1) ^ 1)  # the first round waits for nothing
            fetch(pool_ptr, slots, stride, c_tiles.index(buffer), 0, RANK, layout)
            fetch(pool_ptr, slots, stride, r_tiles.index(buffer), RANK, ROPE, layout)
            async_copy.mbarrier_arrive(ready.index(buffer), increment_count=False)  # each thread, its copies done
            filled += 1
            slots = find_slots(table, positions, PAGE_SIZE)  # positions a tile ahead: no chain of two waits
            positions = find_positions(selected, tile + 2, end, BLOCK_N, keys)


@gluon.jit
def _attend(
    c_tiles, r_tiles, ready, free, q, q_rope, p_tile, used, end, scale_log2,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr,
    score_layout: gl.constexpr, acc_layout: gl.constexpr,
):  # fmt: skip
    columns: gl.constexpr = gl.SliceLayout(0, score_layout)
    acc_columns: gl.constexpr = gl.SliceLayout(0, acc_layout)
    best = gl.full([BLOCK_H], -1.0e38, gl.float32, columns)
    totals = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, score_layout)  # summed over keys once, at the end
    acc = gl.full([RANK, BLOCK_H], 0.0, gl.float32, acc_layout)
    zero = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, score_layout)
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, score_layout))
    for tile in range((end + BLOCK_N - 1) // BLOCK_N):
        buffer = used % _BUFFERS
        c = c_tiles.index(buffer)
        mbarrier.wait(ready.index(buffer), used // _BUFFERS & 1)
        fence_async_shared()  # what the copies wrote is for the tensor cores
        scores = warpgroup_mma(c, q.permute([1, 0]), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma(r_tiles.index(buffer), q_rope.permute([1, 0]), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores]) * scale_log2
        scores = gl.where((tile * BLOCK_N + keys < end)[:, None], scores, float("-inf"))
        new_best = gl.maximum(best, gl.max(scores, 0))
        shrink = gl.exp2(best - new_best)
        totals = totals * shrink[None, :]
        acc = acc * gl.convert_layout(shrink, acc_columns)[None, :]
        best = new_best
        probs = gl.exp2(scores - best[None, :])
        totals = totals + probs
        p_tile.store(probs.to(p_tile.dtype))
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(c.permute([1, 0]), p_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()  # one thread signals for all
        mbarrier.arrive(free.index(buffer), count=1)
        used += 1
    return acc / gl.convert_layout(gl.sum(totals, 0), acc_columns)[None, :], used


@gluon.jit
def _multiply(
    q_ptr, q_rope_ptr, selected_ptr, out_ptr, num_items, num_rows, first_position, num_selected, scale_log2,
    stride_qt, stride_qh, stride_rt, stride_rh, stride_selected, stride_ot, stride_oh,
    c_tiles, r_tiles, ready, free, q, q_rope, p_tile,
    HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr,
    ROPE: gl.constexpr, BLOCK_K: gl.constexpr,
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
    dims = gl.arange(0, RANK, layout=gl.SliceLayout(0, wide))
    used = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        row, block, _selected, end = find_row(
            item, selected_ptr, num_rows, first_position, num_selected, stride_selected, HEAD_BLOCKS, BLOCK_K
        )
        head = block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, wide))
        r_head = block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, narrow))
        barrier()  # the last row's result has left q
        load_query(q_ptr, row * stride_qt + head * stride_qh, head < HEADS, q, 0, RANK, wide)
        load_query(q_rope_ptr, row * stride_rt + r_head * stride_rh, r_head < HEADS, q_rope, 0, ROPE, narrow)
        fence_async_shared()
        barrier()
        result, used = _attend(
            c_tiles, r_tiles, ready, free, q, q_rope, p_tile, used, end, scale_log2,
            BLOCK_H, BLOCK_N, RANK, score_layout, acc_layout,
        )  # fmt: skip
        q.permute([1, 0]).store(result.to(q.dtype))  # turned back by way of q's place, whole rows at a time
        barrier()
        pointers = out_ptr + (row * stride_ot + head * stride_oh)[:, None] + dims[None, :]
        gl.store(pointers, q.load(wide), mask=(head < HEADS)[:, None] & (dims >= 0)[None, :])


@gluon.jit(
    do_not_specialize=["first_position", "num_items", "num_rows"],
    do_not_specialize_on_alignment=["table_ptr", "selected_ptr"],
)
def _prefill_kernel(
    q_ptr, q_rope_ptr, pool_ptr, table_ptr, selected_ptr, out_ptr, scale_log2, num_items, num_rows, first_position,
    num_selected, stride_qt, stride_qh, stride_rt, stride_rh, stride, stride_selected, stride_ot, stride_oh,
    HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr,
    ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """`num_items` pieces of work (a row and a block of its heads), spread over the programs."""
    dtype: gl.constexpr = pool_ptr.dtype.element_ty
    c_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, RANK], dtype)
    r_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_H], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, RANK], dtype)
    qr_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, ROPE], dtype)
    c_tiles = gl.allocate_shared_memory(dtype, [_BUFFERS, BLOCK_N, RANK], c_shared)
    r_tiles = gl.allocate_shared_memory(dtype, [_BUFFERS, BLOCK_N, ROPE], r_shared)
    p_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_H], p_shared)
    q = gl.allocate_shared_memory(dtype, [BLOCK_H, RANK], q_shared)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, ROPE], qr_shared)
    ready = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(_BUFFERS):
        mbarrier.init(ready.index(buffer), count=32 * _FEEDERS)
        mbarrier.init(free.index(buffer), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_ptr, q_rope_ptr, selected_ptr, out_ptr, num_items, num_rows, first_position, num_selected,
                    scale_log2, stride_qt, stride_qh, stride_rt, stride_rh, stride_selected, stride_ot, stride_oh,
                    c_tiles, r_tiles, ready, free, q, q_rope, p_tile,
                    HEADS, HEAD_BLOCKS, BLOCK_H, BLOCK_N, RANK, ROPE, BLOCK_K,
                ),
            ),
            (
                _feed,
                (
                    pool_ptr, table_ptr, selected_ptr, num_items, num_rows, first_position, num_selected, stride,
                    stride_selected, c_tiles, r_tiles, ready, free,
                    HEAD_BLOCKS, BLOCK_N, RANK, ROPE, PAGE_SIZE, BLOCK_K,
                ),
            ),
        ],
        [_FEEDERS], [_FEEDER_REGISTERS],
    )  # fmt: skip


def prefill_selected(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_row: torch.Tensor,
    first_position: int,
    selected: torch.Tensor,
    scale_log2: float,
    out: torch.Tensor,
) -> None:
    """`latent_prefill` of [n, H, R] queries of one sequence, 64 heads a program."""
    num_queries, num_heads, rank = q_latent.shape
    blocks = -(-num_heads // _HEADS)
    items = num_queries * blocks
    _prefill_kernel[(min(items, num_sms(q_latent.device)),)](
        q_latent, q_rope, latents, page_row, selected, out, scale_log2, items, num_queries, first_position,
        selected.shape[1], q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        latents.stride(1), selected.stride(0), out.stride(0), out.stride(1),
        HEADS=num_heads, HEAD_BLOCKS=blocks, BLOCK_H=_HEADS, BLOCK_N=64, RANK=rank, ROPE=q_rope.shape[2],
        PAGE_SIZE=latents.shape[1], BLOCK_K=max(2048, next_power_of_two(selected.shape[1])),
        num_warps=8,
    )  # fmt: skip
