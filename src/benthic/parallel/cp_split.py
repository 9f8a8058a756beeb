"""What one rank computes of a step under context parallelism, and where every row and page travels. Pure numpy.

Decode rows are computed on every rank. The new tokens of a prefill row are cut into 2n segments of whole pages, and
rank r takes segments r and 2n - 1 - r, so that causal work is even ("zigzag", as in ring attention and Megatron's
context parallelism). From one row to the next the ranks move on by one, or the first would compute every short prompt
of a step alone. Counts are uneven, and zero where a step has fewer pages than segments.

A layer of a prefill works on a *work pool*: pages of one layer, laid out like those of L1, with the context's pages
from their owners and the new tokens of all ranks. A page of the context is there once, however many rows share it.

Letters: T tokens, D decode rows, P prefill rows, M pages of the longest row, n ranks, N rows that this rank computes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benthic.common.layout import ceil_div, owner_of

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's part of a step. A slot is page * page_size + offset, in the work pool or in L1."""

    rank: int
    size: int  # n
    num_decode: int  # D
    own_rows: Int64  # [N] rows of the step's T: the D decode rows, then this rank's prefill rows, rising
    own_index: Int64  # [T] place of each of the step's rows in `own_rows`, -1: another rank's
    # the padded gather of prefill rows
    max_rank_len: int  # prefill rows of the rank that has most; 0: no prefill in the step
    gather_rows: Int64  # [T - D] row of the gather [n * max_rank_len] in which each prefill token comes
    # this rank's segments, as prefill rows of their own over the work pool
    query_lens: Int32  # [segments]
    seq_lens: Int32  # [segments] where the segment ends in its sequence
    work_table: Int32  # [segments, M]; past the row's length: its last page
    # the work pool
    work_pages: int  # without the scratch page behind them
    work_slots: Int64  # [T] where each of the step's tokens is put, decode rows too
    # the context's pages on their way into it
    context_pages: Int32  # [own] L1 pages of this rank, in the order of rows and positions
    max_context: int  # pages of the rank that gives most; 0: no prefill row has a context
    context_from: Int64  # [all] row of the gather [n * max_context]
    context_to: Int64  # [all] page of the work pool
    # into L1: the tokens whose pages this rank keeps
    write_rows: Int64  # [writes] rows of the step's T
    write_slots: Int64  # [writes] slots of L1
    # decode rows over this rank's own pages
    decode_table: Int32  # [D, M'] L1 pages, those of the row that this rank keeps; at least one column
    decode_lens: Int32  # [D] tokens on them, 0: none

    @property
    def own_len(self) -> int:
        """Prefill rows that this rank computes."""
        return len(self.own_rows) - self.num_decode


def split_step(
    *,
    num_decode: int,
    query_lens: Int32,
    seq_lens: Int32,
    page_table: Int32,
    page_size: int,
    rank: int,
    size: int,
) -> RankStep:
    """The part of `rank` in a step of such rows (see `forward.StepInput`), with `size` ranks.

    Page i of a row is page_table[row, i] of the lane of its owner.
    """
    counts, ends = query_lens.astype(np.int64), seq_lens[num_decode:].astype(np.int64)
    cuts = [
        segment_bounds(int(end - count), int(end), page_size, size) for count, end in zip(counts, ends, strict=True)
    ]
    first_rows = num_decode + np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    num_tokens = int(first_rows[-1])
    holder, place = _holders(cuts, num_tokens - num_decode, size)
    rank_lens = np.bincount(holder, minlength=size)
    max_rank_len = int(rank_lens.max()) if len(holder) else 0
    mine = np.flatnonzero(holder == rank) + num_decode
    own_rows = np.concatenate([np.arange(num_decode, dtype=np.int64), mine])
    own_index = np.full(num_tokens, -1, np.int64)
    own_index[own_rows] = np.arange(len(own_rows))
    pool = _place_pages(counts, ends, page_table[num_decode:], page_size, size)
    positions = [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
    segments = _own_segments(cuts, rank, size)
    write_rows, write_slots = _writes(num_decode, seq_lens, positions, page_table, page_size, rank, size)
    decode_table, decode_lens = _decode(num_decode, seq_lens, page_table, page_size, rank, size)
    decode_slots = pool.num_pages * page_size + np.arange(num_decode)
    return RankStep(
        rank=rank,
        size=size,
        num_decode=num_decode,
        own_rows=own_rows,
        own_index=own_index,
        max_rank_len=max_rank_len,
        gather_rows=holder * max_rank_len + place,
        query_lens=np.array([stop - start for _, start, stop in segments], np.int32),
        seq_lens=np.array([stop for _, _, stop in segments], np.int32),
        work_table=pool.table([row for row, _, _ in segments]),
        work_pages=pool.num_pages + ceil_div(num_decode, page_size),
        work_slots=np.concatenate([decode_slots, *pool.slots(positions, page_size)]).astype(np.int64),
        context_pages=pool.ids[pool.owners == rank].astype(np.int32),
        max_context=pool.most,
        context_from=pool.owners * pool.most + pool.order,
        context_to=np.arange(len(pool.ids), dtype=np.int64),
        write_rows=write_rows,
        write_slots=write_slots,
        decode_table=decode_table,
        decode_lens=decode_lens,
    )


def segment_bounds(start: int, end: int, page_size: int, size: int) -> tuple[int, ...]:
    """The 2 * size + 1 positions at which tokens start … end - 1 are cut, at page bounds, as evenly as pages allow.

    Segment s is bounds[s] … bounds[s + 1] - 1. The first ones are a page longer where the pages do not divide.
    """
    first, last = start // page_size, ceil_div(end, page_size)
    base, extra = divmod(last - first, 2 * size)
    bounds, page = [start], first
    for segment in range(2 * size):
        page += base + (segment < extra)
        bounds.append(min(end, max(start, page * page_size)))
    return tuple(bounds)


def segment_holder(row: int, segment: int, size: int) -> int:
    """The rank that computes a segment of the step's prefill row `row`."""
    return (min(segment, 2 * size - 1 - segment) + row) % size


def _segments_of(row: int, rank: int, size: int) -> tuple[int, int]:
    first = (rank - row) % size
    return first, 2 * size - 1 - first


def _own_segments(cuts: list[tuple[int, ...]], rank: int, size: int) -> list[tuple[int, int, int]]:
    """(row, first token, past the last) of the rank's segments that are not empty, in the order of its rows."""
    return [
        (row, bounds[segment], bounds[segment + 1])
        for row, bounds in enumerate(cuts)
        for segment in _segments_of(row, rank, size)
        if bounds[segment] < bounds[segment + 1]
    ]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Where pages lie in the work pool: the context's first, each once however many rows share it, then new ones."""

    rows: list[Int64]  # of each prefill row: the work page of each of its pages
    num_pages: int
    owners: Int64  # of the context's pages, in the order of the work pool
    ids: Int64  # their L1 pages
    order: Int64  # their places among what their owners give
    most: int  # pages of the rank that gives most

    def slots(self, positions: list[Int64], page_size: int) -> list[Int64]:
        """Of each prefill row's new tokens, at these positions of it."""
        pairs = zip(self.rows, positions, strict=True)
        return [pages[span // page_size] * page_size + span % page_size for pages, span in pairs]

    def table(self, rows: list[int]) -> Int32:
        """[rows, M]; behind a row's end its last page."""
        width = max((len(pages) for pages in self.rows), default=1)
        table = [np.pad(self.rows[row], (0, width - len(self.rows[row])), mode="edge") for row in rows]
        return np.array(table, np.int32).reshape(-1, width)


def _place_pages(counts: Int64, ends: Int64, table: Int32, page_size: int, size: int) -> _Pool:
    """The work pool of these prefill rows."""
    context = [ceil_div(int(end - count), page_size) for count, end in zip(counts, ends, strict=True)]
    keys = [_owners(np.arange(held), size) << 32 | table[row, :held] for row, held in enumerate(context)]
    distinct, shared = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]), return_inverse=True)
    owners = distinct >> 32
    given = np.bincount(owners, minlength=size)
    rows, at, free = [], 0, len(distinct)
    for held, end in zip(context, ends, strict=True):
        new = ceil_div(int(end), page_size) - held
        rows.append(np.concatenate([shared[at : at + held], np.arange(free, free + new)]).astype(np.int64))
        at, free = at + held, free + new
    order = np.arange(len(distinct)) - np.concatenate([[0], np.cumsum(given)])[owners]  # sorted by owner
    return _Pool(rows, free, owners, distinct & 0xFFFFFFFF, order, int(given.max()) if len(distinct) else 0)


def _holders(cuts: list[tuple[int, ...]], num_tokens: int, size: int) -> tuple[Int64, Int64]:
    """Of each prefill token: the rank that computes it, and its place among that rank's prefill rows."""
    holder = np.empty(num_tokens, np.int64)
    at = 0
    for row, bounds in enumerate(cuts):
        for segment in range(2 * size):
            count = bounds[segment + 1] - bounds[segment]
            holder[at : at + count] = segment_holder(row, segment, size)
            at += count
    place = np.empty(num_tokens, np.int64)
    for rank in range(size):
        mine = holder == rank
        place[mine] = np.arange(int(mine.sum()))
    return holder, place


def _writes(
    num_decode: int,
    seq_lens: Int32,
    positions: list[Int64],
    table: Int32,
    page_size: int,
    rank: int,
    size: int,
) -> tuple[Int64, Int64]:
    """`write_rows` and `write_slots`."""
    spans = [seq_lens[:num_decode].astype(np.int64) - 1, *positions]
    rows = [np.arange(num_decode), *(np.full(len(span), num_decode + i) for i, span in enumerate(positions))]
    where, row_of = np.concatenate(spans), np.concatenate(rows)
    kept = np.flatnonzero(_owners(where // page_size, size) == rank)
    where, row_of = where[kept], row_of[kept]
    slots = table[row_of, where // page_size].astype(np.int64) * page_size + where % page_size
    return kept.astype(np.int64), slots


def _decode(
    num_decode: int, seq_lens: Int32, table: Int32, page_size: int, rank: int, size: int
) -> tuple[Int32, Int32]:
    """`decode_table` and `decode_lens`."""
    lens = seq_lens[:num_decode].astype(np.int64)
    pages = -(-lens // page_size)
    own = np.maximum(0, -(-(pages - rank) // size))  # pages j = rank, rank + size, … below `pages`
    short = np.where(_owners(pages - 1, size) == rank, pages * page_size - lens, 0)
    mine = table[:num_decode, rank::size]
    if not mine.shape[1]:
        mine = np.zeros((num_decode, 1), np.int32)
    return np.ascontiguousarray(mine, np.int32), (own * page_size - short).astype(np.int32)


def _owners(pages: Int64, size: int) -> Int64:
    """`owner_of`, of an array."""
    return np.asarray(owner_of(pages, size), np.int64)  # type: ignore[arg-type]  # plain arithmetic: arrays do too
