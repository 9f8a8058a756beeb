"""Page arithmetic against counting."""

from hypothesis import given
from hypothesis import strategies as st

from benthic.common.layout import ceil_div, owner_counts, owner_of


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 9))
def test_owner_counts_is_counting_owners(first: int, num: int, owners: int) -> None:
    counted = [0] * owners
    for page in range(first, first + num):
        counted[owner_of(page, owners)] += 1
    assert owner_counts(first, num, owners) == tuple(counted)


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_ceil_div_is_the_least_multiple(a: int, b: int) -> None:
    n = ceil_div(a, b)
    assert (n - 1) * b < a <= n * b
