"""The lanes' free lists: each page goes to its owner, and every misuse is loud."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.common.layout import owner_counts, owner_of
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.lanes import Lane, Lanes


@given(st.integers(1, 8), st.integers(0, 20), st.integers(0, 30))
def test_page_i_of_a_sequence_comes_from_its_owners_lane(owners: int, first: int, num_pages: int) -> None:
    lanes = Lanes(owners, 32)
    pages = lanes.reserve(first, num_pages)
    lanes.check()
    assert len(pages) == num_pages
    assert all(lanes[owner_of(first + i, owners)].is_live(page) for i, page in enumerate(pages))
    taken = owner_counts(first, num_pages, owners)
    assert lanes.free() == [32 - count for count in taken]
    by_owner = {(owner_of(first + i, owners), page) for i, page in enumerate(pages)}
    assert len(by_owner) == num_pages
    lanes.release(first, pages)
    lanes.check()
    assert lanes.free() == [32] * owners


def test_a_page_given_back_is_the_next_to_go_out() -> None:
    lane = Lane(0, 4)
    assert lane.reserve(3) == [0, 1, 2]
    lane.release([1])
    assert lane.reserve(2) == [1, 3]


def test_freeing_a_free_page_is_loud() -> None:
    lane = Lane(3, 4)
    lane.reserve(2)
    lane.release([0])
    with pytest.raises(InvariantError, match="lane 3: page 0 is freed twice"):
        lane.release([0])


@pytest.mark.parametrize("page", [-1, 4])
def test_freeing_a_page_that_does_not_exist_is_loud(page: int) -> None:
    with pytest.raises(InvariantError, match=f"page {page} is freed but the lane has pages 0 … 3"):
        Lane(0, 4).release([page])


def test_reserving_more_than_is_free_is_loud_and_takes_nothing() -> None:
    lane = Lane(0, 2)
    with pytest.raises(InvariantError, match="3 pages asked for, 2 free"):
        lane.reserve(3)
    assert lane.num_free == 2


def test_reserving_what_is_live_is_loud() -> None:
    lane = Lane(0, 2)
    (page,) = lane.reserve(1)
    lane._free.append(page)  # what a bug elsewhere would do
    with pytest.raises(InvariantError, match="free list and the live marks differ"):
        lane.check()
    with pytest.raises(InvariantError, match="reserved while it is live"):
        lane.reserve(1)
