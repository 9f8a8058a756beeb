"""What one tier holds of the tree: its `Holding` of each node, their locks and recency, and the page counts.

L1 and L2 each have one `TierIndex`; both work alike and know nothing of each other. A tier is closed under prefix: it
holds a node only if it holds the node's parent. A use locks a node and, through it, all that is above: `locks` counts
the uses that end at the node and its children with any, so a lock or unlock ends at the first node that is in use
otherwise, and below an unlocked node nothing is locked.
"""

from collections import OrderedDict

from benthic.kvcache.errors import InvariantError
from benthic.kvcache.planner import Holding

PROTECTED_FIFTHS = 4  # the protected SLRU segment holds at most four fifths of the tier's pages

Counts = tuple[int, ...]


class TierIndex:
    """Owned by the tree. The free lists are the machine's."""

    def __init__(self, num_owners: int, total_pages: int) -> None:
        """`total_pages`: of all lanes together; bounds the protected segment."""
        self.cached = [0] * num_owners  # pages in the tree, by owner
        self.evictable = [0] * num_owners  # those of them that no lock holds
        self.leaves: dict[int, Holding] = {}  # unlocked, nothing below in this tier: the planner's candidates
        self.protected: OrderedDict[int, Holding] = OrderedDict()  # least recently accessed first
        self.protected_pages = 0
        self.protected_bound = total_pages * PROTECTED_FIFTHS // 5
        self.root = Holding(0, (0,) * num_owners, None, locks=1)  # locked for ever

    def add(
        self, node_id: int, counts: Counts, above: Holding, pages: tuple[int, ...], tick: int, locks: int
    ) -> Holding:
        """The tier holds one node more, below `above`. With `locks` 1 it takes over a use of `above`."""
        h = Holding(node_id, counts, above, {}, locks, 0, tick, pages)
        above.children[node_id] = h
        self.leaves.pop(above.id, None)
        add(self.cached, counts)
        if not locks:
            add(self.evictable, counts)
            self.leaves[node_id] = h
        return h

    def split(self, lower: Holding, node_id: int, keep: int, upper_counts: Counts, lower_counts: Counts) -> Holding:
        """The first `keep` pages of `lower` become a holding of their own above it, with the same marks."""
        above = lower.parent
        assert above is not None
        upper = Holding(
            node_id,
            upper_counts,
            above,
            {lower.id: lower},
            1 if lower.locks else 0,
            lower.segment,
            lower.last_access,
            lower.pages[:keep],
        )
        lower.pages = lower.pages[keep:]
        lower.counts = lower_counts
        lower.parent = upper
        del above.children[lower.id]
        above.children[node_id] = upper
        if upper.segment:
            self.protected[node_id] = upper
        return upper

    def remove(self, h: Holding) -> tuple[int, ...]:
        """The tier holds an unlocked leaf no more; gives its pages, the caller's from now on."""
        if self.leaves.pop(h.id, None) is not h:
            raise InvariantError(f"node {h.id} is no unlocked leaf of the tier and can't be dropped")
        above = h.parent
        assert above is not None
        del above.children[h.id]
        subtract(self.cached, h.counts)
        subtract(self.evictable, h.counts)
        if h.segment:
            del self.protected[h.id]
            self.protected_pages -= len(h.pages)
        if not above.locks and not above.children:
            self.leaves[above.id] = above
        return h.pages

    def lock(self, h: Holding) -> None:
        """One more use of `h` and so of all above it; no access in the sense of recency."""
        at: Holding | None = h
        while at is not None:
            at.locks += 1
            if at.locks > 1:  # what is above is locked already; the root always is
                return
            subtract(self.evictable, at.counts)
            self.leaves.pop(at.id, None)
            at = at.parent

    def unlock(self, h: Holding) -> None:
        """One use less. Raises InvariantError when there was none."""
        at: Holding | None = h
        while at is not None:
            at.locks -= 1
            if at.locks > 0:
                return
            if at.locks < 0 or at.parent is None:
                raise InvariantError(f"node {at.id} is unlocked more often than locked")
            add(self.evictable, at.counts)
            if not at.children:
                self.leaves[at.id] = at
            at = at.parent

    def access(self, h: Holding, tick: int, *, promote: bool) -> None:
        """Date an access; a hit promotes into the protected segment, whose least recent make room."""
        h.last_access = tick
        if h.segment:
            self.protected.move_to_end(h.id)
        elif promote:
            h.segment = 1
            self.protected[h.id] = h
            self.protected_pages += len(h.pages)
            while self.protected_pages > self.protected_bound:
                _, least = self.protected.popitem(last=False)
                least.segment = 0
                self.protected_pages -= len(least.pages)

    def unlocked(self, h: Holding, end: int, first_of_h: int, count: "CountOf") -> list[int]:
        """Pages by owner that a lock on the path to absolute index `end`, inside `h`, would make unevictable."""
        pages = [0] * len(self.cached)
        at: Holding = h
        first = first_of_h
        while at.parent is not None and not at.locks:  # what is above a locked node is locked
            add(pages, count(first, min(end - first, len(at.pages))))
            at = at.parent
            first -= len(at.pages)
        return pages


class CountOf:
    """Pages by owner of a run that starts at an absolute index; from a table, since nodes come in few shapes."""

    __slots__ = ("_num_owners", "_table")

    def __init__(self, num_owners: int, table: list[list[Counts]]) -> None:
        self._num_owners = num_owners
        self._table = table

    def __call__(self, first: int, num_pages: int) -> Counts:
        return self._table[first % self._num_owners][num_pages]


def add(total: list[int], counts: Counts) -> None:
    """total += counts, by owner."""
    for owner, count in enumerate(counts):
        total[owner] += count


def subtract(total: list[int], counts: Counts) -> None:
    """total -= counts, by owner."""
    for owner, count in enumerate(counts):
        total[owner] -= count
