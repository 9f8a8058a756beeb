"""The owner-lane eviction planner: which nodes a tier gives up when some of its lanes lack pages. Pure.

Score of an evictable node, least first: (-contribution, -unlock, SLRU segment, last access, id), where

- contribution = sum over owners o of min(counts[o], deficits[o]), with the deficits that are left at that moment;
- unlock = the sum of the contributions of the ancestors that the eviction would open: go up from the victim and stop at
  the first node that is locked, or that has a child in this tier besides the one just come from (children that the plan
  has taken do not count). Each node passed would have nothing below it once the victim, the plan's earlier victims and
  the nodes passed before it are gone, so it is evictable in its turn.

A candidate has no child in this tier; taking the last child of an unlocked node makes that node a candidate. The plan
ends when every deficit is met, or when nothing that could still be evicted holds a page for an open deficit.

Contributions only fall, so a heap whose entries are checked when they come up picks what a full rescan would pick, as
long as no entry is worse than the truth. The one thing that rises is the unlock of a leaf when a victim leaves an
ancestor of it with this branch only; then the leaf is pushed anew. (`planner_reference.greedy_plan` is the rescan.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace


@dataclass(slots=True, eq=False)
class Holding:
    """What one tier holds of one node of the tree; owned by the tree, only read here.

    Locks are closed towards the root: with a node all its ancestors are locked. So what is unlocked can be evicted.
    """

    id: int  # of the node
    counts: tuple[int, ...]  # its pages, by owner
    parent: "Holding | None"  # in this tier; None at the root
    children: "dict[int, Holding]" = field(default_factory=dict)  # in this tier, by id
    locks: int = 0  # uses (of sequences, operations, holds) that end at the node, and its children that have locks
    segment: int = 0  # SLRU: 0 probation, 1 protected
    last_access: int = 0  # tick
    pages: tuple[int, ...] = ()  # index of each page in its owner's lane


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Node ids in the order of eviction, the pages they free and the deficits they leave open, both by owner."""

    victims: tuple[int, ...]
    planned_freed: tuple[int, ...]
    remaining: tuple[int, ...]


# An entry: the score, then the epoch in which it was computed. One node may have several.
_Entry = tuple[int, int, int, int, int, int]


def plan_eviction(candidates: Sequence[Holding], deficits: Sequence[int]) -> EvictionPlan:
    """Choose victims for `deficits` (pages that each owner's lane must free).

    `candidates` are all unlocked holdings without children, in any order. O(candidates + nodes above them that only one
    branch hangs on + victims · log candidates). Raises ValueError for a candidate that is locked or has children, and
    for a negative deficit.
    """
    if min(deficits) < 0:
        raise ValueError(f"a deficit is negative: {list(deficits)}")
    if any(h.locks or h.children for h in candidates):
        raise ValueError("a candidate for eviction is locked or has children in this tier")
    if not any(deficits):
        return EvictionPlan((), (0,) * len(deficits), tuple(deficits))
    return _Planning(deficits).run(candidates)


class _Planning:
    """One plan in the making; nothing outside it changes."""

    def __init__(self, deficits: Sequence[int]) -> None:
        self.left = list(deficits)
        self.unmet = sum(deficits)
        self.freed = [0] * len(deficits)
        self.victims: list[int] = []
        self.gone: set[int] = set()  # asked for membership only
        self.lost: dict[int, int] = {}  # children taken so far, by parent
        open_lanes = [o for o, d in enumerate(deficits) if d]
        self.value: _Value = _OneLane(self.left, open_lanes[0]) if len(open_lanes) == 1 else _SeveralLanes(self.left)
        self.epoch = 0  # rises when a contribution may have fallen
        self.heap: list[_Entry] = []
        self.holdings: dict[int, Holding] = {}  # whatever has been pushed, by id

    def run(self, candidates: Sequence[Holding]) -> EvictionPlan:
        self.holdings = {h.id: h for h in candidates}
        self.heap = [self._entry(h) for h in candidates]
        heapify(self.heap)
        reachable: list[int] | None = None  # pages that can still be evicted, by owner; counted when it matters
        while self.unmet and (best := self._best()) is not None:
            if self.heap[0][0] == 0:  # nothing contributes by itself: is there anything behind it?
                if reachable is None:
                    reachable = self._reachable()
                if not any(d and n for d, n in zip(self.left, reachable, strict=True)):
                    break
            heappop(self.heap)
            self._take(best)
            if reachable is not None:
                reachable = [n - c for n, c in zip(reachable, best.counts, strict=True)]
        return EvictionPlan(tuple(self.victims), tuple(self.freed), tuple(self.left))

    def _entry(self, h: Holding) -> _Entry:
        return (-self.value.of(h.counts), -self._unlock(h), h.segment, h.last_access, h.id, self.epoch)

    def _unlock(self, h: Holding) -> int:
        total = 0
        lost = self.lost
        above = h.parent
        while above is not None and not above.locks and len(above.children) - lost.get(above.id, 0) == 1:
            total += self.value.of(above.counts)
            above = above.parent
        return total

    def _best(self) -> Holding | None:
        """Bring an entry that is true now to the top of the heap and give its holding; None: the heap is empty."""
        heap, holdings, epoch, gone, value_of = self.heap, self.holdings, self.epoch, self.gone, self.value.of
        while heap:
            contribution, unlock, segment, last_access, node_id, at = heap[0]
            if node_id in gone:
                heappop(heap)
                continue
            h = holdings[node_id]
            if at == epoch:
                return h
            if contribution < -self.unmet:
                self._cap_contributions()
                continue
            now = -value_of(h.counts)
            if now != contribution:  # the old unlock is no worse than the truth, so it can wait until it matters
                heapreplace(heap, (now, unlock, segment, last_access, node_id, at))
            elif (unlock_now := -self._unlock(h)) != unlock:
                heapreplace(heap, (now, unlock_now, segment, last_access, node_id, epoch))
            else:
                return h
        return None

    def _cap_contributions(self) -> None:
        """No node is worth more than all that is unmet: near the end of a plan, lower most of the heap at once."""
        cap = -self.unmet
        self.heap[:] = [e if e[0] >= cap else (cap, e[1], e[2], e[3], e[4], e[5]) for e in self.heap]
        heapify(self.heap)

    def _take(self, h: Holding) -> None:
        """Make `h` a victim, lower the deficits and push what that opens."""
        self.victims.append(h.id)
        self.gone.add(h.id)
        unmet_before = self.unmet
        for owner, count in enumerate(h.counts):
            self.freed[owner] += count
            if count and (deficit := self.left[owner]):
                fall = min(count, deficit)
                self.left[owner] = deficit - fall
                self.unmet -= fall
        if self.unmet < unmet_before and self.value.may_have_fallen():
            self.epoch += 1
        above = h.parent
        if above is not None:
            lost = self.lost[above.id] = self.lost.get(above.id, 0) + 1
            if not above.locks and (opened := self._opened(above, len(above.children) - lost)) is not None:
                self.holdings[opened.id] = opened
                heappush(self.heap, self._entry(opened))

    def _opened(self, above: Holding, branches: int) -> Holding | None:
        """What a victim below `above` has made a candidate or worth more: `above`, or the end of its only chain."""
        h = above
        while branches == 1:
            if h.id in self.lost:
                h = next(child for child in h.children.values() if child.id not in self.gone)
            else:
                (h,) = h.children.values()
            branches = len(h.children) - self.lost.get(h.id, 0)
        return h if branches == 0 else None

    def _reachable(self) -> list[int]:
        """Pages of everything unlocked that the plan has not taken, by owner."""
        total = [0] * len(self.left)
        seen = set(self.gone)
        for candidate in self.holdings.values():
            h: Holding | None = candidate
            while h is not None and not h.locks and h.id not in seen:
                seen.add(h.id)
                total = [t + c for t, c in zip(total, h.counts, strict=True)]
                h = h.parent
        return total


class _OneLane:
    """Contributions when one lane lacks pages (the only case with one owner): plain integers."""

    def __init__(self, left: list[int], owner: int) -> None:
        self.left = left  # shared with the plan, which lowers it
        self.owner = owner
        self.largest = 0  # contribution ever given

    def of(self, counts: tuple[int, ...]) -> int:
        count, left = counts[self.owner], self.left[self.owner]
        if count > left:
            count = left
        if count > self.largest:
            self.largest = count
        return count

    def may_have_fallen(self) -> bool:
        """Whether the deficit is now below something given out: while it is not, all contributions stand."""
        return self.left[self.owner] < self.largest


class _SeveralLanes:
    """Contributions when several lanes lack pages, remembered by counts: nodes come in few shapes."""

    def __init__(self, left: list[int]) -> None:
        self.left = left
        self.before = list(left)
        self.largest = [0] * len(left)
        self.known: dict[tuple[int, ...], int] = {}

    def of(self, counts: tuple[int, ...]) -> int:
        value = self.known.get(counts)
        if value is None:
            value = self.known[counts] = sum(map(min, counts, self.left))
            self.largest = list(map(max, self.largest, counts))
        return value

    def may_have_fallen(self) -> bool:
        """Whether a deficit that fell is now below a count that was seen; forgets all contributions if so."""
        fallen = any(
            now < largest and now != before
            for now, before, largest in zip(self.left, self.before, self.largest, strict=True)
        )
        self.before = list(self.left)
        if fallen:
            self.known.clear()
        return fallen


_Value = _OneLane | _SeveralLanes
