"""`latent_decode` over selected positions; see `latent_hopper`.

A few warps gather, the others multiply. A tile of 64 keys travels as two halves of its latents through a ring of more
halves than two tiles have, so that while a tile is worked on, all of the next and some of the one behind it are under
way: at the memory's rate a multiprocessor must have some 32 KiB under way at any time.
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

from benthic.kernels.latent_hopper.gather.kernel import barrier, count_keys, fetch, find_slots, load_query
from benthic.kernels.latent_prefill.kernel import pool_arguments
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two

_GROUP = gl.constexpr(128)  # codes that share a scale


@gluon.jit
def _part_of(lens, count, num_selected, split, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, PART: gl.constexpr):
    """Tiles first … last - 1 of one split, and the entries' end."""
    if PART:  # another rank has most of the entries
        end = count
        whole = count
    else:
        end = gl.minimum(gl.load(lens), num_selected)
        whole = num_selected  # a split knows its first tile before the length has come
    per_split = ((whole + BLOCK_N - 1) // BLOCK_N + SPLITS - 1) // SPLITS
    first = split * per_split
    return first, gl.minimum(first + per_split, (end + BLOCK_N - 1) // BLOCK_N), end


@gluon.jit
def _positions(selected, tile, num_selected, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Positions of a tile's keys; position 0, which is written, hence no NaN, where scores are masked."""
    index = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=layout)
    return gl.maximum(gl.load(selected + index, mask=index < num_selected, other=0), 0)


@gluon.jit
def _feed_copies(
    pool_ptr, table, selected, first, last, num_selected, stride, c_ring, r_ring, ready, free,
    BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Tiles first … last - 1 of a pool in the compute dtype."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    keys: gl.constexpr = gl.SliceLayout(1, layout)
    HALF: gl.constexpr = RANK // 2
    slots = find_slots(table, _positions(selected, first, num_selected, BLOCK_N, keys), PAGE_SIZE)
    positions = _positions(selected, first + 1, num_selected, BLOCK_N, keys)
    filled = 0
    for tile in range(first, last):
        for half in gl.static_range(2):
            buffer = filled % BUFFERS
            mbarrier.wait(free.index(buffer), (filled // BUFFERS & 1) ^ 1)  # the first round waits for nothing
            if half == 0:  # its place was last read before this half's
                fetch(pool_ptr, slots, stride, r_ring.index(filled // 2 % ((BUFFERS + 1) // 2)), RANK, ROPE, layout)
            fetch(pool_ptr, slots, stride, c_ring.index(buffer), half * HALF, HALF, layout)
            async_copy.mbarrier_arrive(ready.index(buffer), increment_count=False)  # each thread, its copies done
            filled += 1
        slots = find_slots(table, positions, PAGE_SIZE)  # positions a tile ahead: no chain of two waits
        positions = _positions(selected, tile + 2, num_selected, BLOCK_N, keys)


@gluon.jit
def _load_group(codes_ptr, scales_ptr, slots, stride, START: gl.constexpr, layout: gl.constexpr):
    """Codes by fours, which stay in a register so, and their scales."""
    words = START // 4 + gl.arange(0, _GROUP // 4, layout=gl.SliceLayout(0, layout))
    rows = slots.to(gl.int64) * (stride // 16 * 4)  # 16-byte loads
    return gl.load(codes_ptr + rows[:, None] + words[None, :]), gl.load(scales_ptr + rows + START // _GROUP)


@gluon.jit
def _store_group(codes, scales, smem, START: gl.constexpr):
    WIDE: gl.constexpr = "bf16x2" if smem.dtype == gl.bfloat16 else "f16x2"
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .b32 x, y; .reg .b16 h0, h1, h2, h3; .reg .f32 f0, f1, f2, f3;"
        "mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;"
        "mov.b32 {h0, h1}, x; mov.b32 {h2, h3}, y;"
        "cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;"
        "mul.f32 f0, f0, $3; mul.f32 f1, f1, $3; mul.f32 f2, f2, $3; mul.f32 f3, f3, $3;"
        "cvt.rn." + WIDE + ".f32 $0, f1, f0; cvt.rn." + WIDE + ".f32 $1, f3, f2; }",
        "=r,=r,r,f", [codes, scales[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    rows: gl.constexpr = smem.shape[0]
    pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    words = smem._reinterpret(gl.int32, [rows, smem.shape[1] // 2], pairs)
    words.slice(START // 2, _GROUP // 2, dim=1).store(gl.join(low, high).reshape([rows, _GROUP // 2]))


@gluon.jit
def _load_rope(rope_ptr, slots, stride, ROPE: gl.constexpr, layout: gl.constexpr):
    rows = gl.convert_layout(slots, gl.SliceLayout(1, layout)).to(gl.int64) * (stride // 16 * 8)  # 16-byte loads
    dims = gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))
    return gl.load(rope_ptr + rows[:, None] + dims[None, :])


@gluon.jit
def _feed_codes(
    codes_ptr, scales_ptr, rope_ptr, table, selected, first, last, num_selected, stride, c_ring, r_ring, ready, free,
    BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Of an fp8 pool: codes come into registers, a tile ahead, and leave them as numbers."""
    gl.static_assert(RANK == 4 * _GROUP)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    keys: gl.constexpr = gl.SliceLayout(1, layout)
    slots = find_slots(table, _positions(selected, first, num_selected, BLOCK_N, keys), PAGE_SIZE)
    codes_0, scales_0 = _load_group(codes_ptr, scales_ptr, slots, stride, 0, layout)
    codes_1, scales_1 = _load_group(codes_ptr, scales_ptr, slots, stride, _GROUP, layout)
    codes_2, scales_2 = _load_group(codes_ptr, scales_ptr, slots, stride, 2 * _GROUP, layout)
    codes_3, scales_3 = _load_group(codes_ptr, scales_ptr, slots, stride, 3 * _GROUP, layout)
    rope = _load_rope(rope_ptr, slots, stride, ROPE, narrow)
    slots = find_slots(table, _positions(selected, first + 1, num_selected, BLOCK_N, keys), PAGE_SIZE)
    positions = _positions(selected, first + 2, num_selected, BLOCK_N, keys)
    filled = 0
    for tile in range(first, last):
        low = filled % BUFFERS
        mbarrier.wait(free.index(low), (filled // BUFFERS & 1) ^ 1)  # the first round waits for nothing
        r_ring.index(filled // 2 % ((BUFFERS + 1) // 2)).store(rope.to(r_ring.dtype))
        rope = _load_rope(rope_ptr, slots, stride, ROPE, narrow)
        _store_group(codes_0, scales_0, c_ring.index(low), 0)
        codes_0, scales_0 = _load_group(codes_ptr, scales_ptr, slots, stride, 0, layout)
        _store_group(codes_1, scales_1, c_ring.index(low), _GROUP)
        codes_1, scales_1 = _load_group(codes_ptr, scales_ptr, slots, stride, _GROUP, layout)
        fence_async_shared()  # what was stored is for the tensor cores
        barrier()
        mbarrier.arrive(ready.index(low), count=1)
        filled += 1
        high = filled % BUFFERS
        mbarrier.wait(free.index(high), (filled // BUFFERS & 1) ^ 1)
        _store_group(codes_2, scales_2, c_ring.index(high), 0)
        codes_2, scales_2 = _load_group(codes_ptr, scales_ptr, slots, stride, 2 * _GROUP, layout)
        _store_group(codes_3, scales_3, c_ring.index(high), _GROUP)
        codes_3, scales_3 = _load_group(codes_ptr, scales_ptr, slots, stride, 3 * _GROUP, layout)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(high), count=1)
        filled += 1
        slots = find_slots(table, positions, PAGE_SIZE)
        positions = _positions(selected, tile + 3, num_selected, BLOCK_N, keys)


@gluon.jit
def _feed(
    codes_ptr, scales_ptr, rope_ptr, table, selected, lens, count, num_selected, split, stride,
    c_ring, r_ring, ready, free,
    BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    SPLITS: gl.constexpr, PART: gl.constexpr, BUFFERS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    first, last, _end = _part_of(lens, count, num_selected, split, BLOCK_N, SPLITS, PART)
    if FP8:
        _feed_codes(
            codes_ptr, scales_ptr, rope_ptr, table, selected, first, last, num_selected, stride,
            c_ring, r_ring, ready, free, BLOCK_N, RANK, ROPE, PAGE_SIZE, BUFFERS,
        )  # fmt: skip
    else:
        _feed_copies(
            codes_ptr, table, selected, first, last, num_selected, stride,
            c_ring, r_ring, ready, free, BLOCK_N, RANK, ROPE, PAGE_SIZE, BUFFERS,
        )  # fmt: skip


@gluon.jit
def _load_valid(selected, tile, end, keys, BLOCK_N: gl.constexpr):
    """A tile's entries, negative where there is no key: also within the row's length."""
    index = tile * BLOCK_N + keys
    return gl.load(selected + index, mask=index < end, other=-1)


@gluon.jit
def _attend(
    c_ring, r_ring, ready, free, q_0, q_1, q_rope, p_tile, selected, first, last, end, scale_log2,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, BUFFERS: gl.constexpr,
    score_layout: gl.constexpr, acc_layout: gl.constexpr,
):  # fmt: skip
    columns: gl.constexpr = gl.SliceLayout(0, score_layout)
    acc_columns: gl.constexpr = gl.SliceLayout(0, acc_layout)
    best = gl.full([BLOCK_H], -1.0e38, gl.float32, columns)
    totals = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, score_layout)  # summed over keys once, at the end
    acc_0 = gl.full([RANK // 2, BLOCK_H], 0.0, gl.float32, acc_layout)
    acc_1 = gl.full([RANK // 2, BLOCK_H], 0.0, gl.float32, acc_layout)
    zero = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, score_layout)
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, score_layout))
    valid = _load_valid(selected, first, end, keys, BLOCK_N)
    used = 0
    for tile in range(first, last):
        low = used % BUFFERS
        high = (used + 1) % BUFFERS
        c_0 = c_ring.index(low)
        c_1 = c_ring.index(high)
        mbarrier.wait(ready.index(low), used // BUFFERS & 1)
        fence_async_shared()  # what the copies wrote is for the tensor cores
        r = r_ring.index(used // 2 % ((BUFFERS + 1) // 2))
        scores = warpgroup_mma(c_0, q_0.permute([1, 0]), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma(r, q_rope.permute([1, 0]), scores, is_async=True)
        mbarrier.wait(ready.index(high), (used + 1) // BUFFERS & 1)
        fence_async_shared()
        scores = warpgroup_mma(c_1, q_1.permute([1, 0]), scores, is_async=True)
        next_valid = _load_valid(selected, tile + 1, end, keys, BLOCK_N)
        scores = warpgroup_mma_wait(0, deps=[scores]) * scale_log2
        scores = gl.where((valid >= 0)[:, None], scores, float("-inf"))
        valid = next_valid
        new_best = gl.maximum(best, gl.max(scores, 0))
        probs = gl.exp2(scores - new_best[None, :])
        shrink = gl.exp2(best - new_best)
        totals = totals * shrink[None, :] + probs
        best = new_best
        p_tile.store(probs.to(p_tile.dtype))
        shrink = gl.convert_layout(shrink, acc_columns)[None, :]
        acc_0 = acc_0 * shrink
        acc_1 = acc_1 * shrink
        fence_async_shared()
        barrier()
        acc_0 = warpgroup_mma(c_0.permute([1, 0]), p_tile, acc_0, is_async=True)
        acc_1 = warpgroup_mma(c_1.permute([1, 0]), p_tile, acc_1, is_async=True)
        acc_0, acc_1 = warpgroup_mma_wait(0, deps=[acc_0, acc_1])
        barrier()  # one thread signals for all
        mbarrier.arrive(free.index(low), count=1)
        mbarrier.arrive(free.index(high), count=1)
        used += 2
    return acc_0, acc_1, best, gl.sum(totals, 0)


@gluon.jit
def _multiply(
    q_ptr, q_rope_ptr, selected, lens, count, part_ptr, lse_ptr, scale_log2, num_selected, row, block, split,
    stride_qt, stride_qh, stride_rt, stride_rh, stride_pt, stride_ph, stride_ps,
    c_ring, r_ring, ready, free, q_0, q_1, q_rope, p_tile,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    SPLITS: gl.constexpr, PART: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    across: gl.constexpr = warps // 4
    HALF: gl.constexpr = RANK // 2
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, across], instr_shape=[16, BLOCK_H // across, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, BLOCK_H, 16]
    )
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    q_head = block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, wide))
    r_head = block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, narrow))
    load_query(q_ptr, row * stride_qt + q_head * stride_qh, q_head < HEADS, q_0, 0, HALF, wide)
    load_query(q_ptr, row * stride_qt + q_head * stride_qh, q_head < HEADS, q_1, HALF, HALF, wide)
    load_query(q_rope_ptr, row * stride_rt + r_head * stride_rh, r_head < HEADS, q_rope, 0, ROPE, narrow)
    fence_async_shared()
    barrier()
    first, last, end = _part_of(lens, count, num_selected, split, BLOCK_N, SPLITS, PART)
    columns: gl.constexpr = gl.SliceLayout(0, score_layout)
    head = block * BLOCK_H + gl.arange(0, BLOCK_H, layout=columns)
    lse_pointers = lse_ptr + (row * HEADS + head) * SPLITS + split
    if first >= last:  # a short row leaves parts empty: their weight is 0, their result stays unwritten
        gl.store(lse_pointers, gl.full([BLOCK_H], float("-inf"), gl.float32, columns), mask=head < HEADS)
    else:
        acc_0, acc_1, best, total = _attend(
            c_ring, r_ring, ready, free, q_0, q_1, q_rope, p_tile, selected, first, last, end, scale_log2,
            BLOCK_H, BLOCK_N, RANK, BUFFERS, score_layout, acc_layout,
        )  # fmt: skip
        acc_columns: gl.constexpr = gl.SliceLayout(0, acc_layout)
        inverse = gl.convert_layout(1.0 / total, acc_columns)[None, :]
        out_head = block * BLOCK_H + gl.arange(0, BLOCK_H, layout=acc_columns)
        dims = gl.arange(0, HALF, layout=gl.SliceLayout(1, acc_layout))
        out_rows = row * stride_pt + out_head * stride_ph + split * stride_ps
        pointers = part_ptr + out_rows[None, :] + dims[:, None]
        mask = (out_head < HEADS)[None, :] & (dims >= 0)[:, None]
        gl.store(pointers, (acc_0 * inverse).to(part_ptr.dtype.element_ty), mask=mask)
        gl.store(pointers + HALF, (acc_1 * inverse).to(part_ptr.dtype.element_ty), mask=mask)
        if SPLITS > 1 or PART:
            gl.store(lse_pointers, best + gl.log2(total), mask=head < HEADS)


@gluon.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "selected_ptr", "lens_ptr"])
def _decode_kernel(
    q_ptr, q_rope_ptr, codes_ptr, scales_ptr, rope_ptr, table_ptr, lens_ptr, selected_ptr, part_ptr, lse_ptr,
    scale_log2, num_selected, stride_qt, stride_qh, stride_rt, stride_rh, stride, stride_table, stride_selected,
    stride_pt, stride_ph, stride_ps,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr, PART: gl.constexpr,
    BUFFERS: gl.constexpr, FEEDERS: gl.constexpr, FEEDER_REGISTERS: gl.constexpr,
    FP8: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    HALF: gl.constexpr = RANK // 2
    c_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    r_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_H], dtype)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, HALF], dtype)
    qr_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, ROPE], dtype)
    c_ring = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK_N, HALF], c_shared)
    r_ring = gl.allocate_shared_memory(dtype, [(BUFFERS + 1) // 2, BLOCK_N, ROPE], r_shared)
    p_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_H], p_shared)
    q_0 = gl.allocate_shared_memory(dtype, [BLOCK_H, HALF], q_shared)
    q_1 = gl.allocate_shared_memory(dtype, [BLOCK_H, HALF], q_shared)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, ROPE], qr_shared)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(buffer), count=1 if FP8 else 32 * FEEDERS)
        mbarrier.init(free.index(buffer), count=1)
    row = gl.program_id(0).to(gl.int64)  # row * stride passes 2**31
    block = gl.program_id(1)
    split = gl.program_id(2)
    lens = lens_ptr + row
    table = table_ptr + row * stride_table
    selected = selected_ptr + row * stride_selected
    wait_for_previous(PDL)
    count = 0
    if PART:  # of a row without a token here the first entry is -1 too
        count = count_keys(selected, gl.maximum(gl.minimum(gl.load(lens), num_selected), 1), BLOCK_K)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_ptr, q_rope_ptr, selected, lens, count, part_ptr, lse_ptr, scale_log2, num_selected,
                    row, block, split, stride_qt, stride_qh, stride_rt, stride_rh, stride_pt, stride_ph, stride_ps,
                    c_ring, r_ring, ready, free, q_0, q_1, q_rope, p_tile,
                    HEADS, BLOCK_H, BLOCK_N, RANK, ROPE, SPLITS, PART, BUFFERS,
                ),
            ),
            (
                _feed,
                (
                    codes_ptr, scales_ptr, rope_ptr, table, selected, lens, count, num_selected, split, stride,
                    c_ring, r_ring, ready, free,
                    BLOCK_N, RANK, ROPE, PAGE_SIZE, SPLITS, PART, BUFFERS, FP8,
                ),
            ),
        ],
        [FEEDERS], [FEEDER_REGISTERS],
    )  # fmt: skip


def warps_and_buffers(rows: int, *, fp8: bool) -> dict[str, int]:
    """Launch sizes for `rows` heads a program: what fits in shared memory and in registers without spilling."""
    return {
        "num_warps": 8 if fp8 else rows // 8,  # those that multiply
        "FEEDERS": 8 if fp8 else 4,  # codes cost arithmetic
        "FEEDER_REGISTERS": 104 if fp8 and rows == 32 else 80,
        "BUFFERS": 5 if rows == 32 else 4,
    }


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

    `latents`: [pages + 1, page, R + P] in the queries' dtype, or fp8 records. The normalised parts go to `parts`
    (strides of row, head and split), their log-sum-exp (base 2) to `lse`; where the row's other keys lie elsewhere
    (`part`), of one split too, and a row may have no token or no selected one.
    """
    batch, num_heads, rank = q_latent.shape
    fp8 = latents.dtype == torch.uint8
    views, strides = pool_arguments(latents, rank)
    if fp8:
        views[0] = views[0].view(torch.int32)  # four codes an element
    _decode_kernel[(batch, -(-num_heads // rows), splits)](
        q_latent, q_rope, *views, page_table, seq_lens, selected, parts, lse, scale_log2, selected.shape[1],
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), strides[0],
        page_table.stride(0), selected.stride(0), *part_strides,
        HEADS=num_heads, BLOCK_H=rows, BLOCK_N=64, RANK=rank, ROPE=q_rope.shape[2], PAGE_SIZE=latents.shape[1],
        BLOCK_K=max(2048, next_power_of_two(selected.shape[1])), SPLITS=splits, PART=part,
        FP8=fp8, **warps_and_buffers(rows, fp8=fp8), **pdl(q_latent.device),
    )  # fmt: skip
