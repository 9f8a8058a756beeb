"""`index_scores_prefill` and `index_scores_decode` in Triton.

A product's rows are keys and its columns (query, head) pairs: relu, weight and the sum over a query's heads then stay
within the four threads that hold a key's row. A prefill program takes a tile of queries and a part of the keys, leaves
out the tiles past its last query, and lets the queries stay in shared memory; a decode program takes every n-th tile
of one row. Both sum along E in one product and over heads in `_sum_heads`, so a score depends on its query and key
alone: not on the chunk, the other rows or the part. Prefill and decode agree bit by bit if the compiler gives both
products the same instruction, which it may not: ask no more than closeness of them.
Keys past the end of what a query sees stay in their own rows of the product, so they need no mask.
Limits: page size a power of two, contiguous last dimensions.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.index_scores.tiles import (
    ScoreTiles,
    decode_parts,
    decode_tiles,
    padded,
    prefill_part,
    prefill_tiles,
)
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous


@triton.jit
def _look_up(table, tile, last_key, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Pages of a tile's keys: one, or one a key. Tiles and keys past the last key get that one's."""
    if PAGE_SIZE >= BLOCK_N:  # a tile lies in one page: one table entry
        page = tl.load(table + tl.minimum(tile * BLOCK_N, last_key) // PAGE_SIZE)
    else:
        page = tl.load(table + tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), last_key) // PAGE_SIZE)
    return page


@triton.jit
def _load_keys(
    keys_ptr, scales_ptr, page, tile, last_key, stride_page, stride_scale_page,
    HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_E)
    page = page.to(tl.int64)  # page * stride_page passes 2**31
    if PAGE_SIZE >= BLOCK_N:
        offset = tile * BLOCK_N % PAGE_SIZE + keys
        rows = keys_ptr + page * stride_page + offset[:, None] * HEAD_DIM
        scale_rows = scales_ptr + page * stride_scale_page + offset
    else:
        offset = tl.minimum(tile * BLOCK_N + keys, last_key) % PAGE_SIZE
        rows = keys_ptr + (page * stride_page + offset * HEAD_DIM)[:, None]
        scale_rows = scales_ptr + page * stride_scale_page + offset
    if HEAD_DIM == BLOCK_E:
        k = tl.load(rows + dims[None, :])
    else:  # the product's depth is a power of two
        k = tl.load(rows + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
    scale = tl.full((BLOCK_N,), 1.0, tl.float32)
    if FP8:
        scale = tl.load(scale_rows)
    return k, scale


@triton.jit
def _sum_heads(k, scale, q, weights, QUERIES: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr):
    """[keys, queries] float32 of k [keys, E], q [queries * heads, E] and weights [queries * heads].

    Columns lie as `_column` says: a thread holds the same pair of every eight, so with four queries side by side all
    heads of one: their sum needs no exchange.
    """
    TOGETHER: tl.constexpr = QUERIES if QUERIES < 4 else 4
    products = tl.dot(k, tl.trans(q), input_precision="ieee")
    weighted = tl.maximum(products, 0.0) * weights[None, :]
    split = tl.reshape(weighted, (k.shape[0], QUERIES // TOGETHER, HEADS // 2, TOGETHER, 2))
    scores = tl.reshape(tl.sum(tl.sum(split, 2), 3), (k.shape[0], QUERIES))
    if FP8:  # a key's scale is positive: relu lets it pass
        scores = scores * scale[:, None]
    return scores


@triton.jit
def _column(QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Query and head of each column: four queries in turn have two heads each."""
    TOGETHER: tl.constexpr = QUERIES if QUERIES < 4 else 4
    column = tl.arange(0, QUERIES * HEADS)
    inner = column % (TOGETHER * HEADS)
    query = column // (TOGETHER * HEADS) * TOGETHER + inner // 2 % TOGETHER
    return query, inner // (2 * TOGETHER) * 2 + column % 2


# where a chunk starts and what it sees change from step to step: no new compilation for such numbers
@triton.jit(
    do_not_specialize=["num_queries", "first_position", "num_keys", "part_tiles"],
    do_not_specialize_on_alignment=["table_ptr"],
)
def _prefill_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, table_ptr, out_ptr, num_queries, first_position, num_keys, part_tiles,
    stride_qt, stride_qh, stride_wt, stride_page, stride_scale_page, stride_ot,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, FP8: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    query_tile, part = tl.program_id(0), tl.program_id(1)
    query_tiles = tl.cdiv(num_queries, QUERIES)
    first_query = (query_tiles - 1 - query_tile) * QUERIES  # the last queries see most keys: start them first
    last_query = tl.minimum(first_query + QUERIES, num_queries) - 1
    seen = tl.minimum(first_position + last_query + 1, num_keys)
    first = part * part_tiles
    last = tl.minimum(first + part_tiles, tl.cdiv(seen, BLOCK_N))
    if first >= last:  # a part of which no query of the tile sees anything
        return

    query, head = _column(QUERIES, HEADS)
    query += first_query
    inside = (query < num_queries) & (head < NUM_HEADS)  # the last tile may be short; heads are padded
    dims = tl.arange(0, BLOCK_E)
    q_rows = q_ptr + query.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh  # long chunks pass 2**31
    q = tl.load(q_rows + dims[None, :], mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    weights = tl.load(weights_ptr + query.to(tl.int64) * stride_wt + head, mask=inside, other=0.0)
    out_query = first_query + tl.arange(0, QUERIES)
    out_rows = out_ptr + out_query.to(tl.int64)[None, :] * stride_ot  # queries x keys passes 2**31
    keys = tl.arange(0, BLOCK_N)
    page = _look_up(table_ptr, first, num_keys - 1, BLOCK_N, PAGE_SIZE)
    for tile in tl.range(first, last):
        if not AHEAD:
            page = _look_up(table_ptr, tile, num_keys - 1, BLOCK_N, PAGE_SIZE)
        k, scale = _load_keys(
            keys_ptr, scales_ptr, page, tile, num_keys - 1, stride_page, stride_scale_page,
            HEAD_DIM, BLOCK_E, BLOCK_N, PAGE_SIZE, FP8,
        )  # fmt: skip
        if AHEAD:  # a look-up in the tile's own turn would be one of the stages: no keys would be loaded ahead
            page = _look_up(table_ptr, tile + 1, num_keys - 1, BLOCK_N, PAGE_SIZE)
        scores = _sum_heads(k, scale, q, weights, QUERIES, HEADS, FP8)
        position = tile * BLOCK_N + keys
        mask = (position < num_keys)[:, None] & (out_query < num_queries)[None, :]  # what a row has, rows there are
        tl.store(out_rows + position[:, None], scores, mask=mask)


@triton.jit(do_not_specialize=["stride_table", "skip_below"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"])
def _decode_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, table_ptr, lens_ptr, out_ptr, skip_below,
    stride_qt, stride_qh, stride_wt, stride_page, stride_scale_page, stride_table, stride_ot,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride_table and row * stride_ot may pass 2**31
    part = tl.program_id(1)
    wait_for_previous(PDL)  # queries, their weights and the newest keys are its work
    seq_len = tl.load(lens_ptr + row)
    tiles = tl.cdiv(seq_len, BLOCK_N)
    if (seq_len <= skip_below) | (part >= tiles):  # the grid is made for the longest row
        return
    head = tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_E)
    mask = (head < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]  # heads are padded
    q = tl.load(q_ptr + row * stride_qt + head[:, None] * stride_qh + dims[None, :], mask=mask, other=0.0)
    weights = tl.load(weights_ptr + row * stride_wt + head, mask=head < NUM_HEADS, other=0.0)
    keys = tl.arange(0, BLOCK_N)
    table = table_ptr + row * stride_table
    parts = tl.num_programs(1)
    page = _look_up(table, part, seq_len - 1, BLOCK_N, PAGE_SIZE)
    for tile in tl.range(part, tiles, parts):
        if not AHEAD:
            page = _look_up(table, tile, seq_len - 1, BLOCK_N, PAGE_SIZE)
        k, scale = _load_keys(
            keys_ptr, scales_ptr, page, tile, seq_len - 1, stride_page, stride_scale_page,
            HEAD_DIM, BLOCK_E, BLOCK_N, PAGE_SIZE, FP8,
        )  # fmt: skip
        if AHEAD:
            page = _look_up(table, tile + parts, seq_len - 1, BLOCK_N, PAGE_SIZE)
        scores = tl.reshape(_sum_heads(k, scale, q, weights, 1, HEADS, FP8), (BLOCK_N,))
        position = tile * BLOCK_N + keys
        tl.store(out_ptr + row * stride_ot + position, scores, mask=position < seq_len)


def index_scores_prefill_triton(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_row: torch.Tensor,
    first_position: int,
    num_keys: int,
    out: torch.Tensor,
    tiles: ScoreTiles | None = None,
    part: int | None = None,
) -> None:
    """See `benthic.kernels.index_scores.index_scores_prefill`; `tiles` and `part` override the table's."""
    num_queries, num_heads, head_dim = queries.shape
    if num_queries == 0 or num_keys == 0:
        return
    pool = _Pool(keys, head_dim)
    heads, depth = padded(num_heads, 16), padded(head_dim, 32)
    tiles = tiles or prefill_tiles(heads, depth, queries.element_size(), queries.device)
    part = part or prefill_part(num_queries, num_keys, tiles, heads, queries.device)
    per_tile = tiles.columns // heads
    queries, weights = _unit_stride(queries), _unit_stride(weights)
    grid = (triton.cdiv(num_queries, per_tile), triton.cdiv(triton.cdiv(num_keys, tiles.keys), part))
    _prefill_kernel[grid](
        queries, weights, pool.codes, pool.scales, _unit_stride(page_row), out,
        num_queries, first_position, num_keys, part,
        queries.stride(0), queries.stride(1), weights.stride(0), pool.stride, pool.scale_stride, out.stride(0),
        NUM_HEADS=num_heads, HEADS=heads, HEAD_DIM=head_dim, BLOCK_E=depth, QUERIES=per_tile, BLOCK_N=tiles.keys,
        PAGE_SIZE=pool.page_size, FP8=pool.fp8, AHEAD=tiles.ahead, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def index_scores_decode_triton(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor,
    skip_below: int = 0,
    tiles: ScoreTiles | None = None,
    parts: int | None = None,
) -> None:
    """See `benthic.kernels.index_scores.index_scores_decode`; `tiles` and `parts` override the table's."""
    rows, num_heads, head_dim = queries.shape
    if rows == 0 or max_seq_len <= skip_below:
        return
    pool = _Pool(keys, head_dim)
    heads, depth = padded(num_heads, 16), padded(head_dim, 32)
    tiles = tiles or decode_tiles(heads, depth, queries.element_size(), queries.device)
    parts = parts or decode_parts(rows, max_seq_len, tiles, queries.device)
    queries, weights, page_table = _unit_stride(queries), _unit_stride(weights), _unit_stride(page_table)
    _decode_kernel[(rows, parts)](
        queries, weights, pool.codes, pool.scales, page_table, seq_lens, out, skip_below,
        queries.stride(0), queries.stride(1), weights.stride(0), pool.stride, pool.scale_stride,
        page_table.stride(0), out.stride(0),
        NUM_HEADS=num_heads, HEADS=tiles.columns, HEAD_DIM=head_dim, BLOCK_E=depth, BLOCK_N=tiles.keys,
        PAGE_SIZE=pool.page_size, FP8=pool.fp8, AHEAD=tiles.ahead,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl(queries.device),
    )  # fmt: skip


class _Pool:
    """A pool's codes and scales, and how they lie: strides in elements of each."""

    def __init__(self, keys: torch.Tensor, head_dim: int) -> None:
        self.fp8 = keys.dtype == torch.uint8
        if self.fp8:
            self.page_size = keys.shape[1] // (head_dim + 4)
            assert keys.stride(1) == 1, "the bytes of a page are contiguous"
            self.codes = keys.view(torch.float8_e4m3fn)
            self.scales = keys.view(torch.float32)[:, self.page_size * head_dim // 4 :]
        else:
            self.page_size = keys.shape[1]
            assert keys.stride()[1:] == (head_dim, 1), "the keys of a page are contiguous"
            self.codes = self.scales = keys
        self.stride, self.scale_stride = self.codes.stride(0), self.scales.stride(0)


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
