"""The slot pool against a set that anyone can check by eye."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.tiers.disk.slots import SlotPool

ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "give", "retire"]), st.integers(-1, 12)), max_size=60)


@settings(deadline=None)
@given(num_slots=st.integers(0, 10), actions=ACTIONS)
def test_pool_does_what_a_set_does(num_slots: int, actions: list[tuple[str, int]]) -> None:
    pool = SlotPool(num_slots)
    free, taken = set(range(num_slots)), set()
    for action, slot in actions:
        if action == "take":
            got = pool.take()
            assert (got is None) == (not free)
            if got is not None:
                assert got in free
                free.remove(got)
                taken.add(got)
        elif slot in taken:
            getattr(pool, action)(slot)
            taken.remove(slot)
            if action == "give":
                free.add(slot)
        else:
            with pytest.raises(ValueError, match=f"slot {slot} "):
                getattr(pool, action)(slot)
        assert (pool.num_free, pool.num_taken) == (len(free), len(taken))
        assert {s for s in range(num_slots) if pool.is_free(s)} == free
        pool.check()


@settings(deadline=None)
@given(st.sets(st.integers(0, 20)))
def test_a_pool_from_live_slots_hands_out_the_others_in_order(live: set[int]) -> None:
    pool = SlotPool.from_live(21, live)
    pool.check()
    assert pool.num_taken == len(live)
    assert [pool.take() for _ in range(pool.num_free)] == [s for s in range(21) if s not in live]


@pytest.mark.parametrize("live", [[3, 3], [5], [-1]])
def test_two_owners_and_unknown_slots_are_refused(live: list[int]) -> None:
    with pytest.raises(ValueError, match=r"two owners|does not exist"):
        SlotPool.from_live(5, live)
