"""Finding and fetching rows and tiles of selected latents; see `latent_hopper`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of a group's threads; Triton 3.6 has the latter


@gluon.jit
def count_keys(selected, bound, BLOCK_K: gl.constexpr):
    """How many of the first `bound` (at least 1) entries are positions: all of them, or those before the first -1."""
    count = bound
    if gl.load(selected + bound - 1) < 0:
        index = gl.arange(0, BLOCK_K, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
        count = gl.sum((gl.load(selected + index, mask=index < bound, other=-1) >= 0).to(gl.int32), 0)
    return count


@gluon.jit
def find_row(
    item, selected_ptr, num_rows, first_position, num_selected, stride_selected,
    HEAD_BLOCKS: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Of a piece of work: its row, its block of heads, the row's selections and how many keys these are."""
    row = num_rows - 1 - item // HEAD_BLOCKS  # the last tokens see most keys: start them first
    selected = selected_ptr + row.to(gl.int64) * stride_selected
    end = count_keys(selected, gl.minimum(first_position + row + 1, num_selected), BLOCK_K)
    return row.to(gl.int64), item % HEAD_BLOCKS, selected, end  # row * stride passes 2**31


@gluon.jit
def load_query(base, offsets, inside, smem, START: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Write [heads, WIDTH] elements at base + offsets[head] + START to `smem`, zero where a head is not `inside`."""
    dims = START + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    smem.store(gl.load(base + offsets[:, None] + dims[None, :], mask=inside[:, None], other=0.0))


@gluon.jit
def find_positions(selected, tile, end, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Positions of a tile's keys; behind `end`, where scores are masked, position 0: written, hence no NaN."""
    index = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=layout)
    return gl.load(selected + index, mask=index < end, other=0)


@gluon.jit
def find_slots(table, positions, PAGE_SIZE: gl.constexpr):
    return gl.load(table + positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE


@gluon.jit
def fetch(pool, slots, stride, smem, START: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Start the copies of WIDTH elements from START on of the slots' entries to `smem`."""
    rows = pool + slots.to(gl.int64)[:, None] * stride  # slot * stride passes 2**31
    dims = START + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(smem, rows + dims[None, :], cache_modifier=".cg")
