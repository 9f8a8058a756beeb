"""`latent_prefill` over selected positions with 32 heads a program; see `latent_hopper`.

With so few heads a tile's chain of scores, softmax and product leaves the tensor cores idle. So two groups of four
warps take alternate tiles, and one's softmax hides behind the other's products; at the row's end the leading group
merges what the following one leaves in the place of its last tile. Four more warps gather. As in
`latent_hopper.prefill`, a program stays for many rows.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from benthic.kernels.latent_hopper.gather.kernel import barrier, find_row, load_query
from benthic.kernels.latent_hopper.ring.kernel import BLOCK_H, BUFFERS, PARTS, attend, feed, follower_tile, place
from benthic.kernels.tiles import next_power_of_two, num_sms

_FEEDERS = gl.constexpr(4)  # warps that gather
_FEEDER_REGISTERS = gl.constexpr(64)  # a thread
_FOLLOWER_REGISTERS = gl.constexpr(216)  # the leading group has the rest


@gluon.jit
def _write(acc, q, pointers, inside, START: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    q.permute([1, 0]).store(acc.to(q.dtype))  # turned back by way of q's place, whole rows at a time
    barrier()
    dims = START + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    gl.store(pointers[:, None] + dims[None, :], q.load(layout), mask=inside[:, None] & (dims >= 0)[None, :])


@gluon.jit
def _lead(
    q_ptr, q_rope_ptr, selected_ptr, out_ptr, num_items, num_rows, first_position, num_selected, scale_log2,
    stride_qt, stride_qh, stride_rt, stride_rh, stride_selected, stride_ot, stride_oh,
    c_ring, r_ring, ready, free, r_free, asked, parted, queries, q_rope, p_tile, part_best, part_total,
    HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Loads queries, takes a row's even tiles, merges the other group's part and writes the result."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_H, 16]
    )
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    WIDTH: gl.constexpr = RANK // PARTS
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    used = 0
    phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        row, block, _selected, end = find_row(
            item, selected_ptr, num_rows, first_position, num_selected, stride_selected, HEAD_BLOCKS, BLOCK_K
        )
        head = block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, wide))
        r_head = block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, narrow))
        q_offsets = row * stride_qt + head * stride_qh
        barrier()  # the last row's result has left the queries' place
        for part in gl.static_range(PARTS):
            load_query(q_ptr, q_offsets, head < HEADS, queries.index(part), part * WIDTH, WIDTH, wide)
        r_offsets = row * stride_rt + r_head * stride_rh
        load_query(q_rope_ptr, r_offsets, r_head < HEADS, q_rope.index(0), 0, ROPE, narrow)
        fence_async_shared()
        barrier()
        mbarrier.arrive(asked, count=1)
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        acc_0, acc_1, acc_2, acc_3, best, total = attend(
            c_ring, r_ring, ready, free, r_free, queries, q_rope, p_tile, used, 0, end, scale_log2,
            False, BLOCK_N, RANK, layout,
        )  # fmt: skip
        mbarrier.wait(parted, phase)
        if tiles > 1:
            filled = follower_tile(used, tiles) * PARTS
            other_best = part_best.load(columns)
            joint = gl.maximum(best, other_best)
            other = gl.exp2(other_best - joint)
            total = total * gl.exp2(best - joint) + part_total.load(columns) * other
            other = other[None, :]
            own = gl.exp2(best - joint)[None, :]
            acc_0 = acc_0 * own + place(c_ring, filled, 0, WIDTH).load(layout) * other
            acc_1 = acc_1 * own + place(c_ring, filled, 1, WIDTH).load(layout) * other
            acc_2 = acc_2 * own + place(c_ring, filled, 2, WIDTH).load(layout) * other
            acc_3 = acc_3 * own + place(c_ring, filled, 3, WIDTH).load(layout) * other
            barrier()  # all have read it
            for part in gl.static_range(PARTS):
                mbarrier.arrive(free.index((filled + part) % BUFFERS), count=1)
        pointers = out_ptr + row * stride_ot + head * stride_oh
        inverse = (1.0 / total)[None, :]
        _write(acc_0 * inverse, queries.index(0), pointers, head < HEADS, 0, WIDTH, wide)
        _write(acc_1 * inverse, queries.index(1), pointers, head < HEADS, WIDTH, WIDTH, wide)
        _write(acc_2 * inverse, queries.index(2), pointers, head < HEADS, 2 * WIDTH, WIDTH, wide)
        _write(acc_3 * inverse, queries.index(3), pointers, head < HEADS, 3 * WIDTH, WIDTH, wide)
        used += tiles
        phase ^= 1


@gluon.jit
def _follow(
    selected_ptr, num_items, num_rows, first_position, num_selected, scale_log2, stride_selected,
    c_ring, r_ring, ready, free, r_free, asked, parted, queries, q_rope, p_tile, part_best, part_total,
    HEAD_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Takes a row's odd tiles and leaves its sums in the place of the last one."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_H, 16]
    )
    WIDTH: gl.constexpr = RANK // PARTS
    used = 0
    phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _row, _block, _selected, end = find_row(
            item, selected_ptr, num_rows, first_position, num_selected, stride_selected, HEAD_BLOCKS, BLOCK_K
        )
        mbarrier.wait(asked, phase)
        acc_0, acc_1, acc_2, acc_3, best, total = attend(
            c_ring, r_ring, ready, free, r_free, queries, q_rope, p_tile, used, 1, end, scale_log2,
            True, BLOCK_N, RANK, layout,
        )  # fmt: skip
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        if tiles > 1:
            filled = follower_tile(used, tiles) * PARTS
            place(c_ring, filled, 0, WIDTH).store(acc_0)
            place(c_ring, filled, 1, WIDTH).store(acc_1)
            place(c_ring, filled, 2, WIDTH).store(acc_2)
            place(c_ring, filled, 3, WIDTH).store(acc_3)
            part_best.store(best)
            part_total.store(total)
        barrier()
        mbarrier.arrive(parted, count=1)
        used += tiles
        phase ^= 1


@gluon.jit(
    do_not_specialize=["first_position", "num_items", "num_rows"],
    do_not_specialize_on_alignment=["table_ptr", "selected_ptr"],
)
def _pair_kernel(
    q_ptr, q_rope_ptr, pool_ptr, table_ptr, selected_ptr, out_ptr, scale_log2, num_items, num_rows, first_position,
    num_selected, stride_qt, stride_qh, stride_rt, stride_rh, stride, stride_selected, stride_ot, stride_oh,
    HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """`num_items` pieces of work (a row and a block of its heads), spread over the programs."""
    dtype: gl.constexpr = pool_ptr.dtype.element_ty
    WIDTH: gl.constexpr = RANK // PARTS
    c_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], dtype)
    r_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_H], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, WIDTH], dtype)
    qr_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, ROPE], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    c_ring = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK_N, WIDTH], c_shared)
    r_ring = gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROPE], r_shared)
    p_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_H], p_shared)
    q = gl.allocate_shared_memory(dtype, [PARTS, BLOCK_H, WIDTH], q_shared)
    q_rope = gl.allocate_shared_memory(dtype, [1, BLOCK_H, ROPE], qr_shared)
    best = gl.allocate_shared_memory(gl.float32, [BLOCK_H], flat)
    total = gl.allocate_shared_memory(gl.float32, [BLOCK_H], flat)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    r_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # queries there, part there
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(buffer), count=32 * _FEEDERS)
        mbarrier.init(free.index(buffer), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(r_free.index(buffer), count=1)
        mbarrier.init(turns.index(buffer), count=1)
    gl.warp_specialize(
        [
            (
                _lead,
                (
                    q_ptr, q_rope_ptr, selected_ptr, out_ptr, num_items, num_rows, first_position, num_selected,
                    scale_log2, stride_qt, stride_qh, stride_rt, stride_rh, stride_selected, stride_ot, stride_oh,
                    c_ring, r_ring, ready, free, r_free, turns.index(0), turns.index(1), q, q_rope,
                    p_tiles.index(0), best, total, HEADS, HEAD_BLOCKS, BLOCK_N, RANK, ROPE, BLOCK_K,
                ),
            ),
            (
                _follow,
                (
                    selected_ptr, num_items, num_rows, first_position, num_selected, scale_log2, stride_selected,
                    c_ring, r_ring, ready, free, r_free, turns.index(0), turns.index(1), q, q_rope,
                    p_tiles.index(1), best, total, HEAD_BLOCKS, BLOCK_N, RANK, BLOCK_K,
                ),
            ),
            (
                feed,
                (
                    pool_ptr, table_ptr, selected_ptr, num_items, num_rows, first_position, num_selected, stride,
                    stride_selected, c_ring, r_ring, ready, free, r_free,
                    HEAD_BLOCKS, BLOCK_N, RANK, ROPE, PAGE_SIZE, BLOCK_K,
                ),
            ),
        ],
        [4, _FEEDERS], [_FOLLOWER_REGISTERS, _FEEDER_REGISTERS],
    )  # fmt: skip


def prefill_paired(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_row: torch.Tensor,
    first_position: int,
    selected: torch.Tensor,
    scale_log2: float,
    out: torch.Tensor,
) -> None:
    """`latent_prefill` of [n, H, R] queries of one sequence, 32 heads a program."""
    num_queries, num_heads, rank = q_latent.shape
    blocks = -(-num_heads // BLOCK_H.value)
    items = num_queries * blocks
    _pair_kernel[(min(items, num_sms(q_latent.device)),)](
        q_latent, q_rope, latents, page_row, selected, out, scale_log2, items, num_queries, first_position,
        selected.shape[1], q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        latents.stride(1), selected.stride(0), out.stride(0), out.stride(1),
        HEADS=num_heads, HEAD_BLOCKS=blocks, BLOCK_N=64, RANK=rank, ROPE=q_rope.shape[2],
        PAGE_SIZE=latents.shape[1], BLOCK_K=max(2048, next_power_of_two(selected.shape[1])), num_warps=4,
    )  # fmt: skip
