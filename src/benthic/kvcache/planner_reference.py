"""The eviction planner as a plain full rescan: what `planner.plan_eviction` must equal. For tests and the benchmark."""

from collections.abc import Sequence

from benthic.kvcache.planner import EvictionPlan, Holding


def greedy_plan(candidates: Sequence[Holding], deficits: Sequence[int]) -> EvictionPlan:
    """Score every candidate anew for every victim. Same arguments and result as `plan_eviction`."""
    left = list(deficits)
    freed = [0] * len(left)
    victims: list[int] = []
    open_now = {h.id: h for h in candidates}
    gone: set[int] = set()
    useful = _evictable(candidates)

    def contribution(h: Holding) -> int:
        return sum(min(count, lack) for count, lack in zip(h.counts, left, strict=True))

    def unlock(victim: Holding) -> int:
        total, h = 0, victim
        while (above := h.parent) is not None:
            others = [child for child in above.children.values() if child.id not in gone and child.id != h.id]
            if above.locks or others:
                break
            total += contribution(above)
            h = above
        return total

    def score(h: Holding) -> tuple[int, int, int, int, int]:
        return (-contribution(h), -unlock(h), h.segment, h.last_access, h.id)

    while any(left) and any(contribution(h) for h in useful.values()):
        victim = min(open_now.values(), key=score)
        victims.append(victim.id)
        gone.add(victim.id)
        del open_now[victim.id], useful[victim.id]
        for owner, count in enumerate(victim.counts):
            freed[owner] += count
            left[owner] = max(0, left[owner] - count)
        above = victim.parent
        if above is not None and not above.locks and all(child in gone for child in above.children):
            open_now[above.id] = above
    return EvictionPlan(tuple(victims), tuple(freed), tuple(left))


def _evictable(candidates: Sequence[Holding]) -> dict[int, Holding]:
    """The candidates and all unlocked nodes above them."""
    found: dict[int, Holding] = {}
    for candidate in candidates:
        h: Holding | None = candidate
        while h is not None and not h.locks:
            found[h.id] = h
            h = h.parent
    return found
