"""What the two groups of `latent_hopper.pair` share: a ring of quarter tiles, who fills it, and a group's attention.

A quarter holds 64 keys' 128 latents. There are more of them than two tiles have, so that while both groups work on
theirs, the next is under way. Of rope parts there are two; they come with a tile's last quarter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from benthic.kernels.latent_hopper.gather.kernel import barrier, fetch, find_positions, find_row, find_slots

BLOCK_H = gl.constexpr(32)  # heads of a program
PARTS = gl.constexpr(4)  # quarters of a tile's latents
BUFFERS = gl.constexpr(10)  # quarters in the ring
_DEPTH = gl.constexpr(16)  # keys of one tensor-core instruction


@gluon.jit
def feed(
    pool_ptr, table, selected_ptr, num_items, num_rows, first_position, num_selected, stride, stride_selected,
    c_ring, r_ring, ready, free, r_free,
    HEAD_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The warps that gather: all tiles of the program's rows, one quarter after the other."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    keys: gl.constexpr = gl.SliceLayout(1, layout)
    WIDTH: gl.constexpr = RANK // PARTS
    fed = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _row, _block, selected, end = find_row(
            item, selected_ptr, num_rows, first_position, num_selected, stride_selected, HEAD_BLOCKS, BLOCK_K
        )
        slots = find_slots(table, find_positions(selected, 0, end, BLOCK_N, keys), PAGE_SIZE)
        positions = find_positions(selected, 1, end, BLOCK_N, keys)
        for tile in range((end + BLOCK_N - 1) // BLOCK_N):
            for part in gl.static_range(PARTS):
                filled = fed * PARTS + part
                buffer = filled % BUFFERS
                mbarrier.wait(free.index(buffer), (filled // BUFFERS & 1) ^ 1)  # the first round waits for nothing
                fetch(pool_ptr, slots, stride, c_ring.index(buffer), part * WIDTH, WIDTH, layout)
                if part == PARTS - 1:  # the rope part comes with the last quarter
                    mbarrier.wait(r_free.index(fed % 2), (fed // 2 & 1) ^ 1)
                    fetch(pool_ptr, slots, stride, r_ring.index(fed % 2), RANK, ROPE, layout)
                async_copy.mbarrier_arrive(ready.index(buffer), increment_count=False)  # each thread, its copies done
            fed += 1
            slots = find_slots(table, positions, PAGE_SIZE)  # positions a tile ahead: no chain of two waits
            positions = find_positions(selected, tile + 2, end, BLOCK_N, keys)


@gluon.jit
def _score(c_ring, ready, filled, queries, scores, none, PART: gl.constexpr):
    """Add one quarter's products to the scores [keys, heads], once it has come."""
    buffer = (filled + PART) % BUFFERS
    mbarrier.wait(ready.index(buffer), (filled + PART) // BUFFERS & 1)
    fence_async_shared()  # what the copies wrote is for the tensor cores
    q = queries.index(PART + none).permute([1, 0])
    return warpgroup_mma(c_ring.index(buffer), q, scores, use_acc=PART > 0, is_async=True)


@gluon.jit
def _sum(c_ring, filled, p_tile, acc, PART: gl.constexpr, KEY: gl.constexpr):
    """Add to one quarter of the result [latents, heads] what keys KEY … KEY + 15 bring."""
    c = c_ring.index((filled + PART) % BUFFERS).slice(KEY, _DEPTH, dim=0)
    return warpgroup_mma(c.permute([1, 0]), p_tile.slice(KEY, _DEPTH, dim=0), acc, is_async=True)


@gluon.jit
def attend(
    c_ring, r_ring, ready, free, r_free, queries, q_rope, p_tile, used, first, end, scale_log2,
    HOLD: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Every second tile from `first` on: four sums [latents, heads], the largest logits (base 2) and total weights.

    `used` counts the tiles of the rows before. HOLD: the last tile's quarters stay taken.
    """
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    WIDTH: gl.constexpr = RANK // PARTS
    best = gl.full([BLOCK_H], -1.0e38, gl.float32, columns)
    totals = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, layout)  # summed over keys once, at the end
    acc_0 = gl.full([WIDTH, BLOCK_H], 0.0, gl.float32, layout)
    acc_1 = gl.full([WIDTH, BLOCK_H], 0.0, gl.float32, layout)
    acc_2 = gl.full([WIDTH, BLOCK_H], 0.0, gl.float32, layout)
    acc_3 = gl.full([WIDTH, BLOCK_H], 0.0, gl.float32, layout)
    zero = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, layout)
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    tiles = (end + BLOCK_N - 1) // BLOCK_N
    for tile in range(first, tiles, 2):
        filled = (used + tile) * PARTS
        rope = (used + tile) % 2
        none = tile >> 20  # 0, which the compiler can't know: constant addresses of queries would all stay in registers
        scores = _score(c_ring, ready, filled, queries, zero, none, 0)
        scores = _score(c_ring, ready, filled, queries, scores, none, 1)
        scores = _score(c_ring, ready, filled, queries, scores, none, 2)
        scores = _score(c_ring, ready, filled, queries, scores, none, 3)
        scores = warpgroup_mma(r_ring.index(rope), q_rope.index(none).permute([1, 0]), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores]) * scale_log2
        scores = gl.where((tile * BLOCK_N + keys < end)[:, None], scores, float("-inf"))
        new_best = gl.maximum(best, gl.max(scores, 0))
        shrink = gl.exp2(best - new_best)
        probs = gl.exp2(scores - new_best[None, :])
        totals = totals * shrink[None, :] + probs
        best = new_best
        p_tile.store(probs.to(p_tile.dtype))
        acc_0 = acc_0 * shrink[None, :]
        acc_1 = acc_1 * shrink[None, :]
        acc_2 = acc_2 * shrink[None, :]
        acc_3 = acc_3 * shrink[None, :]
        fence_async_shared()
        barrier()
        mbarrier.arrive(r_free.index(rope), count=1)
        for key in gl.static_range(0, BLOCK_N, _DEPTH):  # in turn: a product waits for the last one to the same sum
            acc_0 = _sum(c_ring, filled, p_tile, acc_0, 0, key)
            acc_1 = _sum(c_ring, filled, p_tile, acc_1, 1, key)
            acc_2 = _sum(c_ring, filled, p_tile, acc_2, 2, key)
            acc_3 = _sum(c_ring, filled, p_tile, acc_3, 3, key)
        release = (not HOLD) or tile + 2 < tiles
        acc_0, acc_1 = warpgroup_mma_wait(2, deps=[acc_0, acc_1])
        barrier()  # one thread signals for all
        if release:
            mbarrier.arrive(free.index(filled % BUFFERS), count=1)
            mbarrier.arrive(free.index((filled + 1) % BUFFERS), count=1)
        acc_0, acc_1, acc_2, acc_3 = warpgroup_mma_wait(0, deps=[acc_0, acc_1, acc_2, acc_3])
        barrier()
        if release:
            mbarrier.arrive(free.index((filled + 2) % BUFFERS), count=1)
            mbarrier.arrive(free.index((filled + 3) % BUFFERS), count=1)
    return acc_0, acc_1, acc_2, acc_3, best, gl.sum(totals, 0)


@gluon.jit
def place(c_ring, filled, PART: gl.constexpr, WIDTH: gl.constexpr):
    """A quarter's place in the ring as that of a sum [WIDTH, heads], which is as large."""
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDTH, BLOCK_H], gl.float32)
    return c_ring.index((filled + PART) % BUFFERS)._reinterpret(gl.float32, [WIDTH, BLOCK_H], shared)


@gluon.jit
def follower_tile(used, tiles):
    """The following group's last tile of a row that has one, counted as the ring counts."""
    return used + tiles - 1 - (tiles & 1)
