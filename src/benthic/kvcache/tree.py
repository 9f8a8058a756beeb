"""The radix tree over content hashes: which cached page stands for which prefix, and in which tiers it lies.

Keys are content hashes, one a page; token ids never enter. Equal hashes mean equal prefixes, so a match is a binary
search for presence in one map hash -> node. What a tier holds of a node is a `Holding`: `node.l1`, `node.l2`, or both;
a node in neither has left the tree. Each tier is closed under prefix.
"""

from collections.abc import Callable, Iterator, Sequence

from benthic.common.layout import owner_counts
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.holdings import CountOf, TierIndex
from benthic.kvcache.planner import Holding

MAX_NODE_PAGES = 32  # a longer run is a chain of nodes: no eviction, backup or spill concerns more pages than this


class Node:
    """A run of whole pages that no branch and no end of a locked path divides; owned by the tree.

    Never grows; what follows is a child. Its lower end never moves (a split leaves the lower half in this object), so a
    reference to a node stays a reference to the end of a path.
    """

    __slots__ = (
        "age", "backup", "children", "durable", "first", "hashes", "hits", "id", "l1", "l2", "leaving", "load_back",
        "parent", "spill",
    )  # fmt: skip

    def __init__(self, node_id: int, hashes: tuple[bytes, ...], first: int, parent: "Node | None") -> None:
        self.id = node_id
        self.hashes = hashes
        self.first = first  # absolute index of the first page
        self.parent = parent  # None: this is the root, which has no pages
        self.children: dict[bytes, Node] = {}  # by the first hash of each
        self.l1: Holding | None = None
        self.l2: Holding | None = None
        self.hits = 0  # later sequences that have used it
        self.age = 0  # number of the last admission that used it: how old its pages are on disk
        self.backup = 0  # operation that fills its frames (0: none): they count as no copy yet
        self.load_back = 0  # operation that fills its L1 pages
        self.spill = 0  # durable operation under way
        self.durable = False  # on disk, as far as is known: spares a second spill
        self.leaving = False  # write-back: L1 lets it go when its backup has settled

    @property
    def end(self) -> int:
        """Absolute index of the page after the last."""
        return self.first + len(self.hashes)

    @property
    def in_l2(self) -> bool:
        """Whether L2 has a copy that counts: all its frames are complete on every rank."""
        return self.l2 is not None and not self.backup

    def check(self) -> None:
        """Page hashes = L1 pages (if any) = frames (if any) = counts by owner, 1 … MAX_NODE_PAGES of them.

        Called at every insert and split, and where a backup, spill or reload takes its list of pages.
        """
        num_pages = len(self.hashes)
        l1, l2 = self.l1, self.l2
        if (
            not 0 < num_pages <= MAX_NODE_PAGES
            or (l1 is None and l2 is None)
            or (l1 is not None and (len(l1.pages) != num_pages or sum(l1.counts) != num_pages))
            or (l2 is not None and (len(l2.pages) != num_pages or sum(l2.counts) != num_pages))
        ):
            raise InvariantError(
                f"node {self.id}: {num_pages} hashes, L1 {l1 and (l1.pages, l1.counts)}, "
                f"L2 {l2 and (l2.pages, l2.counts)}"
            )


class RadixTree:
    """Nodes and what the tiers hold of them. The free lists are the machine's."""

    def __init__(self, num_owners: int, l1_pages: int, l2_frames: int = 0) -> None:
        """`l1_pages`, `l2_frames`: of all lanes together."""
        self.num_owners = num_owners
        self.l1 = TierIndex(num_owners, l1_pages)
        self.l2 = TierIndex(num_owners, l2_frames)
        self.counts_of = CountOf(
            num_owners,
            [[owner_counts(i, num, num_owners) for num in range(MAX_NODE_PAGES + 1)] for i in range(num_owners)],
        )
        self.root = Node(0, (), 0, None)
        self.root.l1, self.root.l2 = self.l1.root, self.l2.root
        self.root.durable = True  # nothing is missing above the first page
        self.nodes: dict[int, Node] = {}  # by id, rising, without the root
        self.on_split: Callable[[Node, Node], None] | None = None  # told (lower half, upper half), for marks by node
        self.on_l2_remove: Callable[[Node], None] | None = None  # told the node that L2 has just dropped
        self._by_hash: dict[bytes, Node] = {}
        self.next_id = 1  # of the next node

    # --- matching -----------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes], limit_pages: int, start: int = 0) -> int:
        """How many leading pages of `hashes`, at most `limit_pages`, are in any tier; `start` are known to be."""
        by_hash = self._by_hash
        low, high = start, min(limit_pages, len(hashes))
        while low < high:  # pages before `low` are there, page `high` is not (or out of bounds)
            middle = (low + high) >> 1
            if hashes[middle] in by_hash:
                low = middle + 1
            else:
                high = middle
        return low

    def match_tiers(self, hashes: Sequence[bytes], limit_pages: int) -> tuple[int, int]:
        """`l1_match` and `match` at once."""
        end = self.match(hashes, limit_pages)
        if not end or self._by_hash[hashes[end - 1]].l1 is not None:
            return end, end
        return self.l1_match(hashes, end), end

    def l1_match(self, hashes: Sequence[bytes], limit_pages: int, start: int = 0) -> int:
        """How many leading pages of `hashes`, at most `limit_pages`, L1 holds; the first `start` are known to be."""
        by_hash = self._by_hash
        low, high = start, min(limit_pages, len(hashes))
        while low < high:
            middle = (low + high) >> 1
            node = by_hash.get(hashes[middle])
            if node is not None and node.l1 is not None:
                low = middle + 1
            else:
                high = middle
        return low

    def find(self, page_hash: bytes) -> Node | None:
        """The node that holds this page."""
        return self._by_hash.get(page_hash)

    def l1_unlocked(self, page_hash: bytes, end: int) -> list[int]:
        """Pages by owner that a lock on the path to this page (the one before index `end`) would make unevictable."""
        node = self._by_hash[page_hash]
        assert node.l1 is not None
        return self.l1.unlocked(node.l1, end, node.first, self.counts_of)

    def node_ending_with(self, page_hash: bytes, end: int) -> Node:
        """The node that ends with this page, the one before absolute index `end`; splits where it lies inside one."""
        node = self._by_hash[page_hash]
        keep = end - node.first
        if keep == len(node.hashes):
            return node
        return self.split(node, keep)

    # --- structure ----------------------------------------------------------------------------------------------------

    def insert(
        self,
        parent: Node,
        hashes: tuple[bytes, ...],
        tick: int,
        *,
        l1_pages: tuple[int, ...] | None = None,
        l2_frames: tuple[int, ...] | None = None,
        locks: int = 0,
    ) -> list[Node]:
        """Hang a run of pages below `parent`, as a chain of nodes in one tier, and give them, uppermost first.

        With `locks` 1 a use of `parent` in that tier goes over to the last of them. Raises InvariantError when a page
        is there already or the lists differ in length.
        """
        into_l1 = l1_pages is not None
        pages, held, tier = (l1_pages, parent.l1, self.l1) if into_l1 else (l2_frames, parent.l2, self.l2)
        if pages is None or len(hashes) != len(pages) or not hashes:
            raise InvariantError(f"{len(hashes)} hashes and {len(pages or ())} pages to insert below node {parent.id}")
        if held is None:
            raise InvariantError(f"nodes to insert below node {parent.id}, which the tier does not hold")
        by_hash = self._by_hash
        known = len(by_hash)
        node, first = parent, parent.end
        chain: list[Node] = []
        for start in range(0, len(hashes), MAX_NODE_PAGES):
            part = hashes[start : start + MAX_NODE_PAGES]
            above, node = node, Node(self.next_id, part, first + start, node)
            self.next_id += 1
            counts = self.counts_of(first + start, len(part))
            held = tier.add(node.id, counts, held, pages[start : start + MAX_NODE_PAGES], tick, locks)
            if into_l1:
                node.l1 = held
            else:
                node.l2 = held
            node.check()
            self.nodes[node.id] = node
            above.children[part[0]] = node
            for page_hash in part:
                by_hash[page_hash] = node
            chain.append(node)
        if len(by_hash) != known + len(hashes):
            raise InvariantError(f"a page to insert below node {parent.id} is in the tree already")
        return chain

    def l1_attach(self, node: Node, pages: tuple[int, ...], tick: int) -> None:
        """L1 holds the node from now on. Raises InvariantError unless it holds the parent and not yet the node."""
        node.l1 = self._attach(self.l1, node, node.parent.l1 if node.parent else None, node.l1, pages, tick)
        node.check()

    def l2_attach(self, node: Node, frames: tuple[int, ...], tick: int) -> None:
        """L2 holds the node from now on. Raises InvariantError unless it holds the parent and not yet the node."""
        node.l2 = self._attach(self.l2, node, node.parent.l2 if node.parent else None, node.l2, frames, tick)
        node.check()

    def _attach(
        self,
        tier: TierIndex,
        node: Node,
        above: Holding | None,
        now: Holding | None,
        pages: tuple[int, ...],
        tick: int,
    ) -> Holding:
        if above is None or now is not None:
            raise InvariantError(f"node {node.id}: the tier holds it already, or does not hold its parent")
        return tier.add(node.id, self.counts_of(node.first, len(node.hashes)), above, pages, tick, 0)

    def split(self, node: Node, keep: int) -> Node:
        """Cut a node after its first `keep` pages (0 < keep < pages) and give the upper half, which is new.

        The lower half stays in the object, so whoever holds it keeps the end of a path; marks go to both halves.
        """
        if not 0 < keep < len(node.hashes) or node.parent is None:
            raise InvariantError(f"node {node.id} of {len(node.hashes)} pages can't be split after {keep}")
        node.check()
        parent = node.parent
        upper = Node(self.next_id, node.hashes[:keep], node.first, parent)
        self.next_id += 1
        upper.hits, upper.age, upper.durable, upper.leaving = node.hits, node.age, node.durable, node.leaving
        upper.backup, upper.load_back, upper.spill = node.backup, node.load_back, node.spill
        upper_counts = self.counts_of(node.first, keep)
        lower_counts = self.counts_of(node.first + keep, len(node.hashes) - keep)
        if node.l1 is not None:
            upper.l1 = self.l1.split(node.l1, upper.id, keep, upper_counts, lower_counts)
        if node.l2 is not None:
            upper.l2 = self.l2.split(node.l2, upper.id, keep, upper_counts, lower_counts)
        node.hashes = node.hashes[keep:]
        node.first += keep
        node.parent = upper
        upper.children[node.hashes[0]] = node
        parent.children[upper.hashes[0]] = upper
        self.nodes[upper.id] = upper
        self._by_hash.update(dict.fromkeys(upper.hashes, upper))
        upper.check()
        node.check()
        if self.on_split is not None:
            self.on_split(node, upper)
        return upper

    def l1_remove(self, node: Node) -> tuple[int, ...]:
        """L1 drops an unlocked leaf, which leaves the tree unless L2 holds it; gives the pages."""
        assert node.l1 is not None
        pages = self.l1.remove(node.l1)
        node.l1 = None
        node.leaving = False
        if node.l2 is None:
            self._prune(node)
        return pages

    def l2_remove(self, node: Node) -> tuple[int, ...]:
        """L2 drops an unlocked leaf, which leaves the tree unless L1 holds it; gives the frames."""
        assert node.l2 is not None
        frames = self.l2.remove(node.l2)
        node.l2 = None
        if self.on_l2_remove is not None:
            self.on_l2_remove(node)
        if node.l1 is None:
            self._prune(node)
        return frames

    def _prune(self, node: Node) -> None:
        """Whatever L3 holds. Closed tiers leave nothing below a node that is in neither."""
        if node.children:
            raise InvariantError(f"node {node.id} is in no tier but has {len(node.children)} children")
        parent = node.parent
        assert parent is not None
        del self.nodes[node.id]
        for page_hash in node.hashes:
            del self._by_hash[page_hash]
        del parent.children[node.hashes[0]]

    # --- paths --------------------------------------------------------------------------------------------------------

    def path(self, node: Node, above: Node) -> Iterator[Node]:
        """The nodes from `node` up to below `above`. Raises InvariantError when `above` is not on the way up."""
        while node is not above:
            yield node
            if node.parent is None:
                raise InvariantError(f"node {above.id} is not above the path")
            node = node.parent

    def nodes_of(self, bottom: Node, first: int) -> list[Node]:
        """The nodes that cover the pages from absolute index `first` to the end of `bottom`, uppermost first."""
        nodes = []
        node = bottom
        while node.end > first:
            nodes.append(node)
            assert node.parent is not None
            node = node.parent
        nodes.reverse()
        return nodes

    def l1_lock_path(self, node: Node, above: Node, tick: int, *, is_hit: bool) -> tuple[list[int], list[int]]:
        """A sequence's use goes on from `above` down to `node`.

        Gives the L1 pages on the way, in order, and the load-back operations that still fill some of them. A hit (by a
        later sequence than the one that computed the pages) counts and promotes to the protected segment.
        """
        parts: list[tuple[int, ...]] = []
        filling: list[int] = []
        tier = self.l1
        for below in self.path(node, above):  # deepest first: recency falls with depth
            h = below.l1
            assert h is not None
            tier.access(h, tick, promote=is_hit)
            below.leaving = False
            if is_hit:
                below.hits += 1
                if below.l2 is not None:
                    self.l2.access(below.l2, tick, promote=True)
            if below.load_back and below.load_back not in filling:
                filling.append(below.load_back)
            parts.append(h.pages)
        assert node.l1 is not None
        assert above.l1 is not None
        tier.lock(node.l1)
        tier.unlock(above.l1)
        parts.reverse()
        return [page for part in parts for page in part], filling

    def l1_unlock_path(self, node: Node, tick: int) -> None:
        """A sequence whose path ended with `node` is over. Its nodes count as accessed now."""
        tier = self.l1
        h = node.l1
        assert h is not None
        tier.unlock(h)
        while h.parent is not None:
            tier.access(h, tick, promote=False)
            h = h.parent

    # --- checking -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant of the whole tree; for tests. Raises InvariantError naming the first that fails."""
        num_hashes = 0
        for node in self.nodes.values():
            parent = node.parent
            demand(parent is not None, f"node {node.id} has no parent")
            assert parent is not None
            node.check()
            num_hashes += len(node.hashes)
            demand(node.first == parent.end, f"node {node.id} does not start where its parent ends")
            demand(parent is self.root or self.nodes.get(parent.id) is parent, f"node {node.id}: parent has gone")
            demand(parent.children.get(node.hashes[0]) is node, f"node {node.id} is not its parent's child")
            demand(all(self._by_hash.get(h) is node for h in node.hashes), f"node {node.id}: the map misses its hashes")
            demand(not node.backup or (node.l1 is not None and node.l2 is not None), f"node {node.id}: backup of what?")
            demand(not node.load_back or (node.l1 is not None and node.in_l2), f"node {node.id}: load-back of what?")
            demand(parent.l2 is None or not parent.backup or not node.in_l2, f"node {node.id}: committed too early")
        demand(num_hashes == len(self._by_hash), "the map has hashes of no node")
        demand(list(self.nodes) == sorted(self.nodes), "node order")
        nodes = self.nodes.values()
        self._check_tier(self.l1, [(n, n.l1, n.parent.l1 if n.parent else None) for n in nodes])
        self._check_tier(self.l2, [(n, n.l2, n.parent.l2 if n.parent else None) for n in nodes])

    def _check_tier(self, tier: TierIndex, held: list[tuple[Node, Holding | None, Holding | None]]) -> None:
        cached, evictable = [0] * self.num_owners, [0] * self.num_owners
        protected = 0
        ids: dict[int, None] = {}
        for node, h, above in held:
            if h is None:
                continue
            ids[node.id] = None
            demand(h.id == node.id and above is not None and h.parent is above, f"node {node.id}: not closed")
            assert above is not None
            demand(above.children.get(node.id) is h, f"node {node.id}: children in its tier")
            demand(above.locks > 0 or not h.locks, f"node {node.id}: locked below an unlocked node")
            demand(h.counts == owner_counts(node.first, len(node.hashes), self.num_owners), f"node {node.id}: counts")
            protected += len(h.pages) if h.segment else 0
            for owner, count in enumerate(h.counts):
                cached[owner] += count
                evictable[owner] += 0 if h.locks else count
            is_leaf = not h.locks and not h.children
            demand((tier.leaves.get(node.id) is h) == is_leaf, f"node {node.id}: wrongly (not) a candidate")
            demand((tier.protected.get(node.id) is h) == bool(h.segment), f"node {node.id}: segment")
            demand(all(child in self.nodes for child in h.children), f"node {node.id}: a child has gone")
        demand(all(i in ids for i in tier.leaves) and all(i in ids for i in tier.protected), "a leaf has gone")
        demand(protected == tier.protected_pages <= max(tier.protected_bound, 0), f"{protected} protected pages")
        demand((cached, evictable) == (tier.cached, tier.evictable), "page counts differ from a recount")
        demand(tier.root.locks >= 1, "the root's lock")


def demand(holds: bool, what: str) -> None:
    """Raises InvariantError(what) unless it holds."""
    if not holds:
        raise InvariantError(what)
