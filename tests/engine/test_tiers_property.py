"""Scheduler, core and tier workers together, over fake tiers that are late, fail, hang and outlive the engine.

The driver checks in every tick: every invariant of the core; nobody held past its bound; no forward beside decodes that
waits for a load-back; what was cached is what was not computed. The fakes check: nothing is freed that they still move;
a gather reads what it says.
"""

from collections import Counter

import pytest

from tests.support.tier_workload import Workload


def live_through(seeds: range, *, num_ranks: int = 1, with_disk: bool = True) -> Counter[str]:
    """Each seed's engines, one after another over the same disks; what happened in all of them."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        w = Workload(seed, num_ranks, with_disk)
        try:
            for _ in range(w.rng.randint(0, 2) if with_disk else 0):
                w.live(w.rng.randint(20, 80), kill=w.rng.random() < 0.5)
            w.live(w.rng.randint(20, 80), kill=False)
        except BaseException as error:
            error.add_note(f"seed {seed}, {num_ranks} ranks, disk {with_disk}")
            raise
        counts += w.counts
    return counts


def test_any_workload_gets_right_answers_with_a_host_tier_alone():
    seen = live_through(range(1000, 1030), with_disk=False)
    assert min(seen[what] for what in ("l1", "l2", "load_backs", "failed_backups", "preemptions")) > 0, seen
    assert seen["l3"] == 0


def test_any_workload_gets_right_answers_over_restarts_with_a_disk():
    seen = live_through(range(80))
    happened = ("l1", "l2", "l3", "preemptions", "failed_backups", "failed_spills", "timeouts", "lost", "errors")
    assert min(seen[what] for what in happened) > 0, seen


def test_ranks_in_lockstep_stay_alike_whatever_their_own_copies_and_disks_do():
    """Their digests are compared in every tick, their clients' answers at the end."""
    seen = live_through(range(20), num_ranks=2) + live_through(range(100, 106), num_ranks=3)
    assert min(seen[what] for what in ("l1", "l2", "l3", "failed_backups", "failed_spills", "timeouts")) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_more_workloads(block):
    seen = live_through(range(10_000 + 60 * block, 10_060 + 60 * block))
    seen += live_through(range(20_000 + 20 * block, 20_020 + 20 * block), num_ranks=2)
    assert min(seen[what] for what in ("l1", "l2", "l3")) > 0
