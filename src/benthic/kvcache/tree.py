"""The radix tree over content hashes: which cached page stands for which prefix, and in which tier it lies.

Keys are content hashes, one a page; token ids never enter. Equal hashes mean equal prefixes, so a match is a binary
search for presence in one map hash -> node. Each tier is closed under prefix: it holds a node only if it holds the
node's parent. What a tier holds of a node is a `Holding` (`planner.py`): `node.l1` now, other tiers beside it later.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from benthic.common.layout import owner_counts
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.planner import Holding

MAX_NODE_PAGES = 32  # a longer run is a chain of nodes: no eviction, backup or spill concerns more pages than this
PROTECTED_FIFTHS = 4  # the protected SLRU segment holds at most four fifths of the tier's pages

Counts = tuple[int, ...]


class Node:
    """A run of whole pages that no branch and no end of a locked path divides; owned by the tree.

    Never grows; what follows is a child. Its lower end never moves (a split leaves the lower half in this object), so a
    reference to a node stays a reference to the end of a path.
    """

    __slots__ = ("children", "first", "hashes", "hits", "id", "l1", "parent")

    def __init__(self, node_id: int, hashes: tuple[bytes, ...], first: int, parent: "Node | None", l1: Holding) -> None:
        self.id = node_id
        self.hashes = hashes
        self.first = first  # absolute index of the first page
        self.parent = parent  # None: this is the root, which has no pages
        self.children: dict[bytes, Node] = {}  # by the first hash of each
        self.l1 = l1
        self.hits = 0  # later sequences that have used it

    @property
    def end(self) -> int:
        """Absolute index of the page after the last."""
        return self.first + len(self.hashes)

    def check(self) -> None:
        """Page hashes = L1 pages = counts by owner, 1 … MAX_NODE_PAGES of them. Called at every insert and split."""
        num_pages = len(self.hashes)
        if not 0 < num_pages <= MAX_NODE_PAGES or num_pages != len(self.l1.pages) or num_pages != sum(self.l1.counts):
            raise InvariantError(
                f"node {self.id}: {num_pages} hashes, {len(self.l1.pages)} L1 pages, counts {self.l1.counts}"
            )


class RadixTree:
    """Nodes, their locks and recency, and the L1 page counts that follow. The free lists are the machine's."""

    def __init__(self, num_owners: int, l1_pages: int) -> None:
        """`l1_pages`: of all lanes together; bounds the protected segment."""
        self.num_owners = num_owners
        self.l1_cached = [0] * num_owners  # pages in the tree, by owner
        self.l1_evictable = [0] * num_owners  # those of them that no lock holds
        self.l1_leaves: dict[int, Holding] = {}  # unlocked, nothing below in L1: the planner's candidates
        self.l1_protected: OrderedDict[int, Holding] = OrderedDict()  # least recently accessed first
        self._protected_pages = 0
        self._protected_bound = l1_pages * PROTECTED_FIFTHS // 5
        self._counts = [
            [owner_counts(first, num, num_owners) for num in range(MAX_NODE_PAGES + 1)] for first in range(num_owners)
        ]
        none = self._counts[0][0]
        self.root = Node(0, (), 0, None, Holding(0, none, None, locks=1))  # locked for ever
        self.nodes: dict[int, Node] = {}  # by id, rising, without the root
        self._by_hash: dict[bytes, Node] = {}
        self._next_id = 1

    # --- matching -----------------------------------------------------------------------------------------------------

    def l1_match(self, hashes: Sequence[bytes], limit_pages: int, start: int = 0) -> int:
        """How many leading pages of `hashes`, at most `limit_pages`, L1 holds; the first `start` are known to be."""
        by_hash = self._by_hash
        low, high = start, min(limit_pages, len(hashes))
        while low < high:  # pages before `low` are there, page `high` is not (or out of bounds)
            middle = (low + high) >> 1
            if hashes[middle] in by_hash:
                low = middle + 1
            else:
                high = middle
        return low

    def l1_unlocked(self, page_hash: bytes, end: int) -> list[int]:
        """Pages by owner that a lock on the path to this page (the one before index `end`) would make unevictable."""
        pages = [0] * self.num_owners
        node: Node | None = self._by_hash[page_hash]
        while node is not None and not node.l1.locks:  # what is above a locked node is locked
            num_pages = min(end, node.end) - node.first
            _add(pages, self._counts[node.first % self.num_owners][num_pages])
            node = node.parent
        return pages

    def node_ending_with(self, page_hash: bytes, end: int) -> Node:
        """The node that ends with this page, the one before absolute index `end`; splits where it lies inside one."""
        node = self._by_hash[page_hash]
        keep = end - node.first
        if keep == len(node.hashes):
            return node
        return self.split(node, keep)

    # --- structure ----------------------------------------------------------------------------------------------------

    def insert(
        self, parent: Node, hashes: tuple[bytes, ...], pages: tuple[int, ...], tick: int, locks: int = 0
    ) -> Node:
        """Hang a run of pages below `parent`, as a chain of nodes with `locks` each, and give the last.

        Raises InvariantError when a page is there already or the two lists differ in length.
        """
        if len(hashes) != len(pages) or not hashes:
            raise InvariantError(f"{len(hashes)} hashes and {len(pages)} pages to insert below node {parent.id}")
        by_hash = self._by_hash
        known = len(by_hash)
        node, first = parent, parent.end
        for start in range(0, len(hashes), MAX_NODE_PAGES):
            part = hashes[start : start + MAX_NODE_PAGES]
            node = self._hang(node, part, first + start, pages[start : start + MAX_NODE_PAGES], tick, locks)
            for page_hash in part:
                by_hash[page_hash] = node
        if len(by_hash) != known + len(hashes):
            raise InvariantError(f"a page to insert below node {parent.id} is in the tree already")
        if not locks:
            self.l1_leaves[node.id] = node.l1
        return node

    def _hang(
        self, parent: Node, hashes: tuple[bytes, ...], first: int, pages: tuple[int, ...], tick: int, locks: int
    ) -> Node:
        above = parent.l1
        node_id = self._next_id
        self._next_id = node_id + 1
        counts = self._counts[first % self.num_owners][len(hashes)]
        l1 = Holding(node_id, counts, above, {}, locks, 0, tick, pages)
        node = Node(node_id, hashes, first, parent, l1)
        node.check()
        self.nodes[node_id] = node
        parent.children[hashes[0]] = node
        above.children[node_id] = l1
        self.l1_leaves.pop(above.id, None)
        _add(self.l1_cached, counts)
        if not locks:
            _add(self.l1_evictable, counts)
        return node

    def split(self, node: Node, keep: int) -> Node:
        """Cut a node after its first `keep` pages (0 < keep < pages) and give the upper half, which is new.

        The lower half stays in the object, so whoever holds it keeps the end of a path; marks go to both halves.
        """
        if not 0 < keep < len(node.hashes) or node.parent is None:
            raise InvariantError(f"node {node.id} of {len(node.hashes)} pages can't be split after {keep}")
        node.check()
        parent, lower = node.parent, node.l1
        above = lower.parent
        assert above is not None
        node_id = self._next_id
        self._next_id = node_id + 1
        row = self._counts[node.first % self.num_owners]
        l1 = Holding(
            node_id,
            row[keep],
            above,
            {node.id: lower},
            lower.locks,
            lower.segment,
            lower.last_access,
            lower.pages[:keep],
        )
        upper = Node(node_id, node.hashes[:keep], node.first, parent, l1)
        upper.hits = node.hits
        node.hashes = node.hashes[keep:]
        node.first += keep
        node.parent = upper
        upper.children[node.hashes[0]] = node
        parent.children[upper.hashes[0]] = upper
        lower.pages = lower.pages[keep:]
        lower.counts = self._counts[node.first % self.num_owners][len(node.hashes)]
        lower.parent = l1
        del above.children[node.id]
        above.children[node_id] = l1
        if l1.segment:
            self.l1_protected[node_id] = l1
        self.nodes[node_id] = upper
        self._by_hash.update(dict.fromkeys(upper.hashes, upper))
        upper.check()
        node.check()
        return upper

    def l1_remove(self, node_id: int) -> tuple[int, tuple[int, ...]]:
        """Prune an unlocked leaf; gives its first page's absolute index and its L1 pages, the caller's from now on."""
        l1 = self.l1_leaves.pop(node_id, None)
        if l1 is None:
            raise InvariantError(f"node {node_id} is no unlocked leaf and can't be pruned")
        node = self.nodes.pop(node_id)
        parent, above = node.parent, l1.parent
        assert parent is not None
        assert above is not None
        for page_hash in node.hashes:
            del self._by_hash[page_hash]
        del parent.children[node.hashes[0]]
        del above.children[node_id]
        _subtract(self.l1_cached, l1.counts)
        _subtract(self.l1_evictable, l1.counts)
        if l1.segment:
            del self.l1_protected[node_id]
            self._protected_pages -= len(l1.pages)
        if not above.locks and not above.children:
            self.l1_leaves[above.id] = above
        return node.first, l1.pages

    # --- locks and recency --------------------------------------------------------------------------------------------

    def l1_path(self, node: Node, above: Node) -> Iterator[Node]:
        """The nodes from `node` up to below `above`. Raises InvariantError when `above` is not on the way up."""
        while node is not above:
            yield node
            if node.parent is None:
                raise InvariantError(f"node {above.id} is not above the path")
            node = node.parent

    def l1_lock_path(self, node: Node, above: Node, tick: int, *, is_hit: bool) -> list[int]:
        """One more sequence goes on from `above` down to `node`; gives the L1 pages on the way, in order.

        A hit (by a later sequence than the one that computed the pages) counts and promotes to the protected segment.
        """
        parts: list[tuple[int, ...]] = []
        for below in self.l1_path(node, above):  # deepest first: recency falls with depth
            h = below.l1
            if not h.locks:
                _subtract(self.l1_evictable, h.counts)
                self.l1_leaves.pop(h.id, None)
            h.locks += 1
            h.last_access = tick
            if h.segment:
                self.l1_protected.move_to_end(h.id)
            elif is_hit:
                self._l1_promote(h)
            if is_hit:
                below.hits += 1
            parts.append(h.pages)
        parts.reverse()
        return [page for part in parts for page in part]

    def l1_unlock_path(self, node: Node, tick: int) -> None:
        """A sequence whose path ended with `node` is over. Its nodes count as accessed now."""
        h, above = node.l1, node.l1.parent
        while above is not None:  # the root stays locked
            if h.locks <= 0:
                raise InvariantError(f"node {h.id} is unlocked more often than locked")
            h.locks -= 1
            h.last_access = tick
            if h.segment:
                self.l1_protected.move_to_end(h.id)
            if not h.locks:
                _add(self.l1_evictable, h.counts)
                if not h.children:
                    self.l1_leaves[h.id] = h
            h, above = above, above.parent

    def _l1_promote(self, h: Holding) -> None:
        """Into the protected segment, as its most recent; what has gone longest without access makes room."""
        h.segment = 1
        self.l1_protected[h.id] = h
        self._protected_pages += len(h.pages)
        while self._protected_pages > self._protected_bound:
            _, least = self.l1_protected.popitem(last=False)
            least.segment = 0
            self._protected_pages -= len(least.pages)

    # --- checking -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant of the whole tree; for tests. Raises InvariantError naming the first that fails."""
        cached, evictable = [0] * self.num_owners, [0] * self.num_owners
        protected, num_hashes = 0, 0
        for node in self.nodes.values():
            l1, parent = node.l1, node.parent
            _demand(parent is not None, f"node {node.id} has no parent")
            assert parent is not None
            self._check_links(node, parent)
            num_hashes += len(node.hashes)
            protected += len(l1.pages) if l1.segment else 0
            _add(cached, l1.counts)
            if not l1.locks:
                _add(evictable, l1.counts)
            is_leaf = not l1.locks and not l1.children
            _demand((self.l1_leaves.get(node.id) is l1) == is_leaf, f"node {node.id}: wrongly (not) a candidate")
            _demand((self.l1_protected.get(node.id) is l1) == bool(l1.segment), f"node {node.id}: segment")
        _demand(num_hashes == len(self._by_hash), "the map has hashes of no node")
        _demand(len(self.l1_leaves) <= len(self.nodes) and all(i in self.nodes for i in self.l1_leaves), "leaves")
        _demand(all(i in self.nodes for i in self.l1_protected), "a protected node is gone")
        _demand(protected == self._protected_pages <= max(self._protected_bound, 0), f"{protected} protected pages")
        _demand((cached, evictable) == (self.l1_cached, self.l1_evictable), "page counts differ from a recount")
        _demand(list(self.nodes) == sorted(self.nodes) and self.root.l1.locks == 1, "node order, or the root's lock")

    def _check_links(self, node: Node, parent: Node) -> None:
        l1 = node.l1
        node.check()
        _demand(node.first == parent.end, f"node {node.id} does not start where its parent ends")
        _demand(parent is self.root or self.nodes.get(parent.id) is parent, f"node {node.id}: parent has gone")
        _demand(parent.children.get(node.hashes[0]) is node, f"node {node.id} is not its parent's child")
        _demand(l1.id == node.id and l1.parent is parent.l1, f"node {node.id}: L1 is not closed under prefix")
        _demand(parent.l1.children.get(node.id) is l1, f"node {node.id}: L1 children")
        _demand(len(l1.children) <= len(node.children), f"node {node.id} has L1 children of no node")
        _demand(parent.l1.locks >= l1.locks or parent is self.root, f"node {node.id}: locked below an unlocked node")
        _demand(l1.counts == owner_counts(node.first, len(node.hashes), self.num_owners), f"node {node.id}: counts")
        _demand(all(self._by_hash.get(h) is node for h in node.hashes), f"node {node.id}: the map misses its hashes")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)


def _add(total: list[int], counts: Counts) -> None:
    for owner, count in enumerate(counts):
        total[owner] += count


def _subtract(total: list[int], counts: Counts) -> None:
    for owner, count in enumerate(counts):
        total[owner] -= count
