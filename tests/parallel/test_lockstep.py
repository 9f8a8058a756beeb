"""Cache cores in processes that agree over gloo: alike in every tick, and stopped where one goes its own way."""

import pytest

from tests.support.cache_ranks import Scenario, run_together
from tests.support.gloo_ranks import GlooRanks
from tests.support.parted_ranks import FAULTS, live_over_gloo, parted_at

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize("whole", [False, True], ids=["lanes", "heads"])
def test_cores_live_over_a_network_as_they_do_without_one(ranks: GlooRanks, whole: bool) -> None:
    scenario = Scenario(1 if whole else ranks.size, 1, 80, whole=ranks.size if whole else 0)
    assert ranks.run(live_over_gloo, scenario) == [run_together(scenario)] * ranks.size


@pytest.mark.parametrize("fault", FAULTS)
def test_over_a_network_the_comparison_of_states_stops_every_rank(ranks: GlooRanks, fault: str) -> None:
    scenario = Scenario(ranks.size, 8, 100)
    said = ranks.run(live_over_gloo, scenario, fault)
    tick = parted_at(scenario, fault)
    assert tick > 1
    assert all(f"the ranks have parted in tick {tick}:" in str(text) for text in said), said
