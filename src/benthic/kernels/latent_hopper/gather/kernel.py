"""Finding and fetching a tile of selected latents; see `latent_hopper`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def count_keys(selected, bound, BLOCK_K: gl.constexpr):
    """How many of the first `bound` (at least 1) entries are positions: all of them, or those before the first -1."""
    count = bound
    if gl.load(selected + bound - 1) < 0:
        index = gl.arange(0, BLOCK_K, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
        count = gl.sum((gl.load(selected + index, mask=index < bound, other=-1) >= 0).to(gl.int32), 0)
    return count


@gluon.jit
def find_positions(selected, tile, end, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Positions of a tile's keys; behind `end`, where scores are masked, position 0: written, hence no NaN."""
    index = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=layout)
    return gl.load(selected + index, mask=index < end, other=0)


@gluon.jit
def find_slots(table, positions, PAGE_SIZE: gl.constexpr):
    return gl.load(table + positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE


@gluon.jit
def gather(pool, slots, stride, c, r, RANK: gl.constexpr, ROPE: gl.constexpr, layout: gl.constexpr):
    """Start the copies of the slots' latents to `c` and of their rope parts to `r`."""
    rows = pool + slots.to(gl.int64)[:, None] * stride  # slot * stride passes 2**31
    dims = gl.arange(0, RANK, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(c, rows + dims[None, :], cache_modifier=".cg")
    dims = RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(r, rows + dims[None, :], cache_modifier=".cg")
