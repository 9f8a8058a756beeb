"""The eviction planner: equal to a plain full rescan, and right on cases that one can follow by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.kvcache.planner import EvictionPlan, Holding, plan_eviction
from benthic.kvcache.planner_reference import greedy_plan

Problem = tuple[list[Holding], list[int]]


def hang(parent: Holding, node_id: int, counts: tuple[int, ...], *, last_access: int = 0, segment: int = 0) -> Holding:
    h = Holding(node_id, counts, parent, last_access=last_access, segment=segment)
    parent.children[node_id] = h
    return h


def root_of(num_owners: int) -> Holding:
    return Holding(0, (0,) * num_owners, None, locks=1)


def candidates_of(holdings: list[Holding]) -> list[Holding]:
    return [h for h in holdings if not h.locks and not h.children]


def lock_path(h: Holding | None) -> None:
    while h is not None:
        h.locks += 1
        h = h.parent


def random_problem(rng: random.Random) -> Problem:
    """A tree of 1 … 60 nodes over 1 … 8 owners: bushy or stringy, with locked paths; not every deficit can be met."""
    num_owners = rng.randint(1, 8)
    nodes = [root_of(num_owners)]
    stringy = rng.random()
    most = rng.choice([1, 3, 12])
    for node_id in range(1, rng.randint(2, 60)):
        parent = nodes[-1] if rng.random() < stringy else rng.choice(nodes)
        counts = tuple(rng.randint(0, most) if rng.random() < 0.8 else 0 for _ in range(num_owners))
        hang(parent, node_id, counts, last_access=rng.randint(0, 6), segment=rng.randint(0, 1))
        nodes.append(parent.children[node_id])
    for _ in range(rng.choice([0, 0, 1, 3])):
        lock_path(rng.choice(nodes))
    deficits = [rng.choice([0, 1, rng.randint(0, 4 * most), rng.randint(0, 40 * most)]) for _ in range(num_owners)]
    candidates = candidates_of(nodes)
    rng.shuffle(candidates)  # the order of the candidates must not matter
    return candidates, deficits


@given(st.integers(min_value=0))
@settings(max_examples=1500, deadline=None)
def test_heap_picks_what_a_full_rescan_picks(seed: int) -> None:
    candidates, deficits = random_problem(random.Random(seed))
    assert plan_eviction(candidates, deficits) == greedy_plan(candidates, deficits)


@pytest.mark.parametrize("start", range(0, 6000, 1500))
def test_heap_picks_what_a_full_rescan_picks_on_fixed_seeds(start: int) -> None:
    differing = []
    for seed in range(start, start + 1500):
        candidates, deficits = random_problem(random.Random(seed))
        if plan_eviction(candidates, deficits) != greedy_plan(candidates, deficits):
            differing.append(seed)
    assert differing == []


def test_a_child_goes_before_its_parent() -> None:
    root = root_of(1)
    parent = hang(root, 1, (4,))
    child = hang(parent, 2, (4,), last_access=9)
    assert plan_eviction([child], [8]) == EvictionPlan((2, 1), (8,), (0,))


def test_the_plan_stops_as_soon_as_the_deficit_is_met() -> None:
    root = root_of(1)
    leaves = [hang(root, i, (4,), last_access=i) for i in (1, 2, 3)]
    assert plan_eviction(leaves, [5]) == EvictionPlan((1, 2), (8,), (0,))


def test_of_equal_contributions_the_one_that_opens_more_goes_first() -> None:
    root = root_of(1)
    alone = hang(root, 1, (4,), last_access=0)
    chain_end = hang(hang(root, 2, (4,)), 3, (4,), last_access=9)
    assert plan_eviction([alone, chain_end], [4]).victims == (3,)


def test_a_siblings_eviction_raises_the_others_unlock() -> None:
    root = root_of(1)
    parent = hang(root, 1, (5,))
    big, small = hang(parent, 2, (6,)), hang(parent, 3, (4,), last_access=9)
    older = hang(root, 4, (4,), last_access=1)  # before `small` by age; behind it once small's parent hangs on it alone
    plan = plan_eviction([big, small, older], [14])
    assert plan == EvictionPlan((2, 3, 1), (15,), (0,)) == greedy_plan([big, small, older], [14])


def test_a_siblings_eviction_raises_the_unlock_at_the_end_of_a_chain() -> None:
    root = root_of(1)
    top = hang(root, 1, (3,))
    gone_first = hang(top, 2, (9,))
    end = hang(hang(top, 3, (1,)), 4, (2,), last_access=9)
    rival = hang(hang(root, 5, (2,)), 6, (2,), last_access=1)  # unlock 2; the end's is 1, then 1 + 3
    plan = plan_eviction([gone_first, end, rival], [11])
    assert plan.victims == (2, 4) == greedy_plan([gone_first, end, rival], [11]).victims


def test_probation_goes_before_protected_and_older_before_newer() -> None:
    root = root_of(1)
    leaves = [
        hang(root, 1, (1,), segment=1, last_access=0),
        hang(root, 2, (1,), segment=0, last_access=7),
        hang(root, 3, (1,), segment=0, last_access=5),
        hang(root, 4, (1,), segment=0, last_access=5),
    ]
    assert plan_eviction(leaves, [4]).victims == (3, 4, 2, 1)


def test_a_locked_node_stays_and_opens_nothing() -> None:
    root = root_of(1)
    parent = hang(root, 1, (4,))
    locked, free = hang(parent, 2, (4,)), hang(parent, 3, (4,))
    lock_path(locked)
    assert plan_eviction([free], [8]) == EvictionPlan((3,), (4,), (4,))


def test_only_the_lanes_that_lack_pages_count() -> None:
    root = root_of(2)
    left, right = hang(root, 1, (9, 1)), hang(root, 2, (0, 2))
    assert plan_eviction([left, right], [0, 2]) == EvictionPlan((2,), (0, 2), (0, 0))


def test_what_holds_no_page_for_an_open_deficit_is_spared() -> None:
    root = root_of(2)
    useful, useless = hang(root, 1, (1, 3)), hang(root, 2, (8, 0))
    assert plan_eviction([useful, useless], [0, 5]) == EvictionPlan((1,), (1, 3), (0, 2))
    assert plan_eviction([useless], [0, 5]) == EvictionPlan((), (0, 0), (0, 5))


def test_leaves_without_a_wanted_page_go_for_the_parent_that_has_one() -> None:
    root = root_of(2)
    parent = hang(root, 1, (0, 2))
    leaves = [hang(parent, 2, (1, 0)), hang(parent, 3, (1, 0))]
    assert plan_eviction(leaves, [0, 2]) == EvictionPlan((2, 3, 1), (2, 2), (0, 0))


def test_no_deficit_takes_nothing() -> None:
    leaf = hang(root_of(2), 1, (3, 3))
    assert plan_eviction([leaf], [0, 0]) == EvictionPlan((), (0, 0), (0, 0))


def test_the_tree_is_only_read() -> None:
    candidates, deficits = random_problem(random.Random(4))
    before = [(h.id, h.counts, h.locks, sorted(h.children), h.segment, h.last_access) for h in candidates]
    plan_eviction(candidates, deficits)
    assert [(h.id, h.counts, h.locks, sorted(h.children), h.segment, h.last_access) for h in candidates] == before


@pytest.mark.parametrize("deficits", [[-1], [1]])
def test_nonsense_is_refused(deficits: list[int]) -> None:
    root = root_of(1)
    parent = hang(root, 1, (1,))
    hang(parent, 2, (1,))
    with pytest.raises(ValueError, match="negative" if deficits[0] < 0 else "locked or has children"):
        plan_eviction([parent], deficits)
