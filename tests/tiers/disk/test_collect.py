"""The order of collecting, against a list that is sorted anew each time."""

from hypothesis import given
from hypothesis import strategies as st

from benthic.tiers.disk.collect import AgeOrder, num_to_collect


@st.composite
def _steps(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    step = st.tuples(
        st.sampled_from(["add", "add", "add", "touch", "remove", "oldest"]),
        st.integers(0, 30),  # page, or how many
        st.integers(0, 5),  # position
        st.integers(0, 6),  # age
    )
    return draw(st.lists(step, max_size=80))


@given(_steps())
def test_pages_go_by_age_and_a_tail_before_its_head(steps: list[tuple[str, int, int, int]]) -> None:
    order = AgeOrder()
    naive: dict[bytes, tuple[int, int]] = {}  # page → age, position
    for action, number, position, age in steps:
        page = bytes([number])
        if action == "add" and page not in naive:
            order.add(page, position, age)
            naive[page] = (age, position)
        elif action == "touch" and page in naive:
            order.remove(page, naive[page][0])
            order.add(page, naive[page][1], age)
            naive[page] = (age, naive[page][1])
        elif action == "remove" and page in naive:
            order.remove(page, naive.pop(page)[0])
        elif action == "oldest":
            taken = order.oldest(number)
            assert len(taken) == min(number, len(naive))
            ranks = sorted((a, -p) for a, p in naive.values())[:number]
            assert [(naive[page][0], -naive[page][1]) for page, _ in taken] == ranks
            for page, age_then in taken:
                assert naive.pop(page)[0] == age_then
        assert len(order) == len(naive)


def test_equal_position_and_age_go_in_one_order() -> None:
    pages = [(bytes([n]), 3, 1) for n in range(9)]
    assert AgeOrder.of(pages).oldest(9) == AgeOrder.of(reversed(pages)).oldest(9)


def test_nothing_goes_up_to_the_start_mark() -> None:
    assert num_to_collect(usable=100, used=89, need=1, start=0.9, stop=0.85) == 0


def test_beyond_the_start_mark_as_many_go_as_lead_to_the_stop_mark() -> None:
    assert num_to_collect(usable=100, used=90, need=1, start=0.9, stop=0.85) == 6


def test_a_round_is_bounded() -> None:
    assert num_to_collect(usable=100_000, used=95_000, need=1, start=0.9, stop=0.85, most=256) == 256


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 64), st.integers(1, 16))
def test_a_round_makes_room_for_what_is_needed(usable: int, used: int, need: int, most: int) -> None:
    used = min(used, usable)
    count = num_to_collect(usable=usable, used=used, need=need, start=0.9, stop=0.85, most=most)
    assert 0 <= count <= used
    if need <= usable:
        assert used - count + need <= usable
