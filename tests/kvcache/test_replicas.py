"""Several cores fed alike, with workers that get on and fail differently: equal in every tick, and nothing leaks."""

from collections import Counter

import pytest

from benthic.kvcache.state import POLICIES
from tests.support.cache_ranks import Rank, RankProcess, Scenario, run_in_step, run_together

TICKS = {1: 400, 2: 300, 4: 200, 8: 120}
MANY_TICKS = 10_000


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("owners", [1, 2, 4, 8])
def test_cores_stay_equal_whatever_their_workers_do(owners: int, policy: str) -> None:
    for seed in (0, 1, 2):
        assert run_together(Scenario(owners, seed, TICKS[owners], policy))["ticks"] >= TICKS[owners]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_share_every_page_stay_equal(ranks: int) -> None:
    """Tensor parallelism: one lane, of which each rank keeps its heads; a page is there where all parts are."""
    for seed in (0, 1):
        seen = run_together(Scenario(1, seed, TICKS[ranks], whole=ranks))
        assert seen["ticks"] >= TICKS[ranks]
        assert min(seen["loaded_back"], seen["backup_failed"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("whole", [False, True], ids=["lanes", "heads"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_cores_stay_equal_for_ten_thousand_ticks(ranks: int, whole: bool) -> None:
    total: Counter[str] = Counter()
    seed = 1000
    while total["ticks"] < MANY_TICKS:
        policy = POLICIES[seed % len(POLICIES)]
        scenario = Scenario(1 if whole else ranks, seed, 500, policy, whole=ranks if whole else 0)
        try:
            total.update(run_together(scenario))
        except BaseException as error:
            error.add_note(f"{scenario}")
            raise
        seed += 1
    assert not [name for name, count in total.items() if not count], total


def test_without_a_disk_cores_stay_equal_too() -> None:
    seen = run_together(Scenario(4, 3, 200, disk=False))
    assert seen["loaded_back"] > 0
    assert seen["backup_failed"] > 0
    assert seen["holds"] == seen["durable"] == 0


def test_the_scenarios_leave_nothing_out() -> None:
    """Whatever a test of this file is worth: each thing that can happen has happened in this one."""
    total: dict[str, int] = {}
    for seed in range(3):
        seen = run_together(Scenario(4, seed, 300))
        total = {name: total.get(name, 0) + count for name, count in seen.items()}
    assert not [name for name, count in total.items() if not count]


@pytest.mark.multirank
def test_cores_in_processes_that_hash_differently_stay_equal() -> None:
    scenario = Scenario(4, 5, 250)
    processes = [RankProcess(lane, scenario, hash_seed) for lane, hash_seed in ((1, 0), (2, 1), (3, 4242))]
    try:
        seen = run_in_step([Rank(0, scenario).turns(), *processes])
    finally:
        for process in processes:
            process.close()
    assert seen["reloaded"] > 0
    assert seen["loaded_back"] > 0
    assert seen["durable"] > 0
