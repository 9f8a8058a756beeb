"""The split of a step over ranks, against a loop over tokens and memory whose cells say which token they hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benthic.common.layout import owner_of
from benthic.parallel.cp_split import RankStep, segment_bounds, split_step

Test = Callable[..., None]
Token = tuple[int, int]  # row of the step, position in its sequence
Cells = dict[int, Token]  # slot -> what lies there
REPLICATED = ("size", "num_decode", "max_rank_len", "gather_rows", "work_pages", "work_slots", "max_context",
              "context_from", "context_to")  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Rows of a step as the scheduler has them; `decode` and `prefill` say where each row's new tokens are."""

    page_size: int
    size: int
    decode: tuple[int, ...]  # sequence lengths, the new token included
    prefill: tuple[tuple[int, int], ...]  # (first new position, past the last)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return (*self.decode, *(end for _, end in self.prefill))

    def tokens(self) -> list[Token]:
        """In the order of the step's rows."""
        decode = [(row, length - 1) for row, length in enumerate(self.decode)]
        spans = [(row, start, end) for row, (start, end) in enumerate(self.prefill, len(self.decode))]
        return decode + [(row, position) for row, start, end in spans for position in range(start, end)]

    def table(self) -> np.ndarray:
        """Pages that are distinct in each lane, in no order; past a row's length page 0, where its lane has others'."""
        pages = [-(-length // self.page_size) for length in self.seq_lens]
        table = np.zeros((len(pages), max(pages)), np.int32)
        total = sum(pages)
        step = next(s for s in (7, 11, 13, 17, 19) if (total + 1) % s)
        free = [[1 + (i * step + lane) % (total + 1) for i in range(total + 1)] for lane in range(self.size)]
        for row, count in enumerate(pages):
            for page in range(count):
                table[row, page] = free[owner_of(page, self.size)].pop()
        return table

    def parts(self) -> list[RankStep]:
        """What each rank does."""
        return [
            split_step(
                num_decode=len(self.decode),
                query_lens=np.array([end - start for start, end in self.prefill], np.int32),
                seq_lens=np.array(self.seq_lens, np.int32),
                page_table=self.table(),
                page_size=self.page_size,
                rank=rank,
                size=self.size,
            )
            for rank in range(self.size)
        ]

    def lanes(self) -> list[Cells]:
        """L1 of each rank before the step: all that was computed earlier."""
        table, new = self.table(), set(self.tokens())
        lanes: list[Cells] = [{} for _ in range(self.size)]
        for row, length in enumerate(self.seq_lens):
            for position in range(length):
                page, offset = divmod(position, self.page_size)
                if (row, position) not in new:
                    lanes[owner_of(page, self.size)][int(table[row, page]) * self.page_size + offset] = (row, position)
        return lanes


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Prompts about as long as the segments are many, at their beginning or further on; and decode rows."""
    size, page_size = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 3, 4, 16]))
    even = 2 * size * page_size
    special = st.sampled_from([1, max(1, page_size - 1), page_size, page_size + 1, even - 1, even, even + 1])
    lengths = special | st.integers(1, 2 * even)
    starts = st.just(0) | st.integers(0, 6 * page_size) | st.integers(0, 5).map(lambda page: page * page_size)
    decode = draw(st.lists(st.integers(1, 3 * size * page_size), max_size=4))
    prefill = draw(st.lists(st.tuples(starts, lengths), min_size=0 if decode else 1, max_size=4))
    return Step(page_size, size, tuple(decode), tuple((start, start + length) for start, length in prefill))


def each_size(test: Test) -> Test:
    """The lengths at which splits go wrong, at every size, whatever is drawn."""
    for size in range(1, 9):
        even = 2 * size * 4
        for length in (1, 3, 4, even - 1, even, even + 1):
            test = example(Step(4, size, (), ((0, length),)))(test)
            test = example(Step(4, size, (length,), ((0, 1), (5, 5 + length), (8, 8 + length))))(test)
    return test


# --- who computes what ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@each_size
@given(steps())
def test_every_prefill_token_is_computed_by_one_rank_and_every_decode_row_by_all(step: Step) -> None:
    tokens, parts = step.tokens(), step.parts()
    done: list[int] = [0] * len(tokens)
    for part in parts:
        assert list(part.own_rows) == sorted(set(part.own_rows.tolist())), "rows rise"
        assert part.own_len == len(part.own_rows) - len(step.decode)
        for place, row in enumerate(part.own_rows.tolist()):
            done[row] += 1
            assert part.own_index[row] == place
        assert [row for row in range(len(tokens)) if part.own_index[row] < 0] == [
            row for row in range(len(tokens)) if row not in part.own_rows.tolist()
        ]
        assert part.max_rank_len == max(other.own_len for other in parts)
    decode = len(step.decode)
    assert done == [step.size] * decode + [1] * (len(tokens) - decode)


@settings(max_examples=100, deadline=None)
@each_size
@given(steps())
def test_segments_are_whole_pages_dealt_in_a_zigzag(step: Step) -> None:
    """Each row is cut into at most 2n runs, at page bounds, of lengths a page apart; two to a rank, mirrored."""
    tokens = step.tokens()
    holder: dict[Token, int] = {}
    for part in step.parts():
        holder |= {tokens[row]: part.rank for row in part.own_rows[len(step.decode) :].tolist()}
    for row, (start, end) in enumerate(step.prefill, len(step.decode)):
        bounds = segment_bounds(start, end, step.page_size, step.size)
        assert len(bounds) == 2 * step.size + 1
        assert (bounds[0], bounds[-1]) == (start, end)
        assert list(bounds) == sorted(bounds)
        assert all(bound in (start, end) or bound % step.page_size == 0 for bound in bounds)
        pages = [len({p // step.page_size for p in range(*bounds[s : s + 2])}) for s in range(2 * step.size)]
        assert max(pages) - min(pages) <= 1
        for segment in range(2 * step.size):
            first = segment if segment < step.size else 2 * step.size - 1 - segment
            rank = (first + row - len(step.decode)) % step.size  # a row's first rank is the next one's second
            assert {holder[row, p] for p in range(*bounds[segment : segment + 2])} <= {rank}


@settings(max_examples=100, deadline=None)
@each_size
@given(steps())
def test_a_ranks_segments_are_prefill_rows_of_its_own_rows(step: Step) -> None:
    tokens = step.tokens()
    for part in step.parts():
        assert part.query_lens.dtype == part.seq_lens.dtype == part.work_table.dtype == np.int32
        assert len(part.query_lens) == len(part.seq_lens) == len(part.work_table) <= 2 * len(step.prefill)
        asked: list[int] = []
        for count, end in zip(part.query_lens.tolist(), part.seq_lens.tolist(), strict=True):
            assert count > 0
            asked += range(end - count, end)
        assert asked == [tokens[row][1] for row in part.own_rows[len(step.decode) :].tolist()]


def work_of(part: RankStep) -> int:
    """Positions that the rank's prefill tokens see, themselves included."""
    pairs = zip(part.query_lens.tolist(), part.seq_lens.tolist(), strict=True)
    return sum(end * (end + 1) // 2 - (end - count) * (end - count + 1) // 2 for count, end in pairs)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.sampled_from([1, 16, 64]), st.integers(0, 40_000), st.integers(1, 40_000))
def test_causal_work_is_even_within_what_whole_pages_allow(size: int, page_size: int, start: int, length: int) -> None:
    end = start + length
    works = [work_of(part) for part in Step(page_size, size, (), ((start, end),)).parts()]
    assert sum(works) == end * (end + 1) // 2 - start * (start + 1) // 2
    # a rank may have a page more than another, and the pages at both ends may have one token each
    assert max(works) - min(works) <= 3 * page_size * end


@pytest.mark.parametrize("size", [2, 4, 8])
def test_of_a_long_prompt_no_rank_has_much_more_than_its_share(size: int) -> None:
    for length in (32_768, 32_769, 50_001):
        works = [work_of(part) for part in Step(64, size, (), ((0, length),)).parts()]
        assert max(works) * size < 1.06 * sum(works)
        lens = [part.own_len for part in Step(64, size, (), ((0, length),)).parts()]
        assert max(lens) * size < 1.06 * sum(lens)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_short_prompts_of_one_step_are_spread_over_the_ranks(size: int) -> None:
    parts = Step(16, size, (), tuple((0, 10) for _ in range(3 * size))).parts()
    assert [part.own_len for part in parts] == [30] * size


def test_a_context_that_rows_share_travels_and_lies_once() -> None:
    """64 requests over one prefix of 8k tokens."""
    pages, rows, size = 128, 64, 4
    table = np.array([[*(page // size for page in range(pages)), 1000 + row] for row in range(rows)], np.int32)
    for rank in range(size):
        part = split_step(
            num_decode=0,
            query_lens=np.full(rows, 5, np.int32),
            seq_lens=np.full(rows, pages * 64 + 5, np.int32),
            page_table=table,
            page_size=64,
            rank=rank,
            size=size,
        )
        assert part.work_pages == pages + rows
        assert part.max_context == pages // size
        assert part.context_pages.tolist() == list(range(pages // size))
        assert len(part.context_to) == pages


# --- what travels -----------------------------------------------------------------------------------------------------


def padded_gather(rows: Sequence[list[Token]], most: int) -> list[Token | None]:
    """As parallel.collectives does it."""
    return [token for mine in rows for token in (*mine, *[None] * (most - len(mine)))]


@settings(max_examples=100, deadline=None)
@each_size
@given(steps())
def test_all_ranks_know_the_same_of_what_they_exchange(step: Step) -> None:
    first, *others = step.parts()
    for other in others:
        for name in REPLICATED:
            np.testing.assert_array_equal(getattr(first, name), getattr(other, name), err_msg=name)


@settings(max_examples=100, deadline=None)
@each_size
@given(steps())
def test_a_padded_gather_is_put_into_the_order_of_the_sequences(step: Step) -> None:
    tokens, parts, decode = step.tokens(), step.parts(), len(step.decode)
    rows = [[tokens[row] for row in part.own_rows[decode:].tolist()] for part in parts]
    gathered = padded_gather(rows, parts[0].max_rank_len)
    assert [gathered[row] for row in parts[0].gather_rows.tolist()] == tokens[decode:]


@settings(max_examples=100, deadline=None)
@each_size
@given(steps())
def test_in_the_work_pool_every_segment_sees_its_sequence(step: Step) -> None:
    """The context's pages come from their owners, then the new tokens; no two meet; a table reads them in order."""
    tokens, parts, lanes, p = step.tokens(), step.parts(), step.lanes(), step.page_size
    given_pages = [[(rank, page) for page in part.context_pages.tolist()] for rank, part in enumerate(parts)]
    assert max(map(len, given_pages)) == parts[0].max_context
    gathered = padded_gather(given_pages, parts[0].max_context)
    pool: Cells = {}
    places = parts[0].context_to.tolist()
    assert len(set(places)) == len(places), "two pages of the context meet"
    for source, place in zip(parts[0].context_from.tolist(), places, strict=True):
        assert 0 <= place < parts[0].work_pages
        page = gathered[source]
        assert page is not None, "padding is taken for a page"
        for offset in range(p):
            if (token := lanes[page[0]].get(page[1] * p + offset)) is not None:
                pool[place * p + offset] = token
    slots = parts[0].work_slots.tolist()
    assert len(set(slots)) == len(slots) == len(tokens)
    for token, slot in zip(tokens, slots, strict=True):
        assert 0 <= slot < parts[0].work_pages * p
        assert slot not in pool, "a new token is put where the context is"
        pool[slot] = token
    for part in parts:
        first = len(step.decode)
        for count, end, table in zip(part.query_lens.tolist(), part.seq_lens.tolist(), part.work_table, strict=True):
            assert table.min() >= 0
            assert table.max() < part.work_pages, "past its length too, a row's table has pages of the pool"
            row, last = tokens[part.own_rows[first + count - 1]]
            assert last == end - 1
            read = [pool[int(table[position // p]) * p + position % p] for position in range(end)]
            assert read == [(row, position) for position in range(end)]
            first += count


@settings(max_examples=100, deadline=None)
@each_size
@given(steps())
def test_each_new_token_is_written_once_at_its_owner(step: Step) -> None:
    tokens, table = step.tokens(), step.table()
    written: dict[Token, tuple[int, int]] = {}
    for rank, part in enumerate(step.parts()):
        assert len(set(part.write_slots.tolist())) == len(part.write_slots) == len(part.write_rows)
        for row, slot in zip(part.write_rows.tolist(), part.write_slots.tolist(), strict=True):
            assert tokens[row] not in written
            written[tokens[row]] = rank, slot
    for row, position in tokens:
        page, offset = divmod(position, step.page_size)
        slot = int(table[row, page]) * step.page_size + offset
        assert written.pop((row, position)) == (owner_of(page, step.size), slot)
    assert not written


@settings(max_examples=100, deadline=None)
@each_size
@given(steps())
def test_decode_rows_find_on_each_rank_what_it_keeps_of_them(step: Step) -> None:
    """Together all positions of a row, each once; new tokens are written before."""
    tokens, lanes, p = step.tokens(), step.lanes(), step.page_size
    parts = step.parts()
    found: list[list[int]] = [[] for _ in step.decode]
    for part, lane in zip(parts, lanes, strict=True):
        written = zip(part.write_rows.tolist(), part.write_slots.tolist(), strict=True)
        lane |= {slot: tokens[row] for row, slot in written}
        assert part.decode_table.dtype == part.decode_lens.dtype == np.int32
        assert part.decode_table.flags.c_contiguous
        assert part.decode_table.shape[0] == len(part.decode_lens) == len(step.decode)
        assert part.decode_table.shape[1] >= 1
        for row, length in enumerate(part.decode_lens.tolist()):
            read = [lane[int(part.decode_table[row, at // p]) * p + at % p] for at in range(length)]
            assert all(of == row for of, _ in read)
            found[row] += [position for _, position in read]
    assert [sorted(positions) for positions in found] == [list(range(length)) for length in step.decode]


# --- cases ------------------------------------------------------------------------------------------------------------


def test_one_token_beside_a_long_prompt() -> None:
    step = Step(64, 4, (), ((0, 1), (0, 8192)))
    parts = step.parts()
    assert [part.own_len for part in parts] == [2049, 2048, 2048, 2048]
    assert [part.query_lens.tolist() for part in parts] == [[1, 1024, 1024], *[[1024, 1024]] * 3]
    assert [part.seq_lens.tolist() for part in parts] == [[1, 4096, 5120], [1024, 8192], [2048, 7168], [3072, 6144]]
    assert parts[0].max_rank_len == 2049
    assert parts[0].work_pages == 1 + 128
    assert parts[0].max_context == 0


def test_a_prompt_of_fewer_pages_than_ranks_leaves_ranks_without_rows() -> None:
    parts = Step(4, 4, (9, 2), ((0, 7),)).parts()
    assert [part.own_len for part in parts] == [4, 3, 0, 0]
    assert [len(part.own_rows) for part in parts] == [6, 5, 2, 2]
    assert parts[3].work_table.shape == (0, 2)
    assert [part.decode_lens.tolist() for part in parts] == [[4, 2], [4, 0], [1, 0], [0, 0]]


def test_a_step_of_decode_rows_alone_exchanges_no_rows() -> None:
    for part in Step(4, 2, (1, 5, 8), ()).parts():
        assert (part.max_rank_len, part.max_context, part.own_len) == (0, 0, 0)
        assert len(part.gather_rows) == len(part.context_to) == len(part.query_lens) == 0
        assert part.own_rows.tolist() == [0, 1, 2]


def test_one_rank_alone_does_everything() -> None:
    (part,) = Step(4, 1, (6,), ((3, 20),)).parts()
    assert part.own_rows.tolist() == list(range(18))
    assert sum(part.query_lens.tolist()) == 17
    assert part.write_rows.tolist() == list(range(18))
    assert part.decode_lens.tolist() == [6]
