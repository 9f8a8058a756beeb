"""A rank that decides by what it alone knows is caught: by the digests, and by the comparison an engine can make."""

import re

import pytest

from tests.support.cache_ranks import Scenario, run_together
from tests.support.parted_ranks import FAULTS, live, parted_at
from tests.support.thread_ranks import run_ranks

TICKS = 100


def scenario_of(size: int, whole: bool = False) -> Scenario:
    return Scenario(1 if whole else size, 8, TICKS, whole=size if whole else 0)


@pytest.mark.parametrize("whole", [False, True], ids=["lanes", "heads"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("fault", FAULTS)
def test_digests_show_a_rank_that_goes_its_own_way(fault: str, size: int, whole: bool) -> None:
    assert 1 < parted_at(scenario_of(size, whole), fault) <= TICKS, "equal at first, then not"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_of_states_stops_every_rank_in_the_tick_in_which_one_goes_its_own_way(
    fault: str, size: int
) -> None:
    scenario = scenario_of(size)
    said = run_ranks(size, lambda group: live(group, scenario, fault))
    tick = parted_at(scenario, fault)
    assert all(isinstance(text, str) and f"the ranks have parted in tick {tick}:" in text for text in said), said
    digests = {re.findall("state is ([0-9a-f]{64})", str(text))[0] for text in said}
    assert len(digests) == 2, "one rank against the others"


def test_the_comparison_of_states_is_content_with_sound_ranks() -> None:
    scenario = scenario_of(4)
    assert run_ranks(4, lambda group: live(group, scenario)) == [run_together(scenario)] * 4
