"""The cache core: a replicated, deterministic state machine over the radix tree and the owner lanes (L1 so far).

Every rank runs one and feeds it the same calls; equal calls give equal cores, in different processes too: no clock, no
random numbers, no iteration over sets, no order by `hash()` or `id()`, no floats. What it answers are page indexes and
counts; it touches no memory of the device.

A page of L1 is free, private (one running sequence may write it) or cached (of the tree, never written again).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from benthic.common.layout import owner_counts
from benthic.kvcache.digest import digest_core
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.lanes import Lanes
from benthic.kvcache.planner import plan_eviction
from benthic.kvcache.tree import Node, RadixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Sizes that all ranks have agreed on. Raises ValueError for what can't be."""

    num_owners: int
    l1_pages: int  # of each lane
    l1_free_pages: int  # of each lane: background eviction keeps this many free

    def __post_init__(self) -> None:
        if self.num_owners < 1 or self.l1_pages < 1:
            raise ValueError(f"a core needs an owner and a page; got {self.num_owners} owners, {self.l1_pages} pages")
        if not 0 <= self.l1_free_pages <= self.l1_pages:
            raise ValueError(f"free-room watermark of {self.l1_free_pages} pages in a lane of {self.l1_pages}")


@dataclass(slots=True, eq=False)
class PageRun:
    """The pages of one running sequence; the core changes it, everybody else reads.

    `pages[i]` is the L1 page of the sequence's page i in the lane of `owner_of(i)`. The first `num_cached` belong to
    the tree and are locked by this run down to `node`, which ends there; the others are private to the sequence.
    """

    seq_id: int
    node: Node
    num_cached: int
    pages: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCounts:
    """One lane in pages: total = free + cached + private; `locked` is what running sequences use of `cached`."""

    total: int
    free: int
    cached: int
    private: int
    locked: int


class CacheCore:
    """Owns the tree, the free lists and the runs. Every change of them is a method of this class."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.evicted_pages = 0  # since the start, flushes left out
        self._tick = 0
        self._tree = RadixTree(config.num_owners, config.num_owners * config.l1_pages)
        self._l1 = Lanes(config.num_owners, config.l1_pages)
        self._runs: dict[int, PageRun] = {}
        low = config.l1_free_pages
        self._refill_to = min(config.l1_pages, low + max(low // 2, config.l1_pages // 64)) if low else 0

    @property
    def num_nodes(self) -> int:
        return len(self._tree.nodes)

    def begin_tick(self, tick: int) -> None:
        """Set the logical clock, by which accesses are dated. Raises ValueError when it goes back."""
        if tick < self._tick:
            raise ValueError(f"the tick goes back from {self._tick} to {tick}")
        self._tick = tick

    # --- sequences ----------------------------------------------------------------------------------------------------

    def probe(self, hashes: Sequence[bytes], limit_pages: int) -> int:
        """How many leading pages of `hashes`, at most `limit_pages`, are in L1. Changes nothing."""
        return self._tree.l1_match(hashes, limit_pages)

    def open(self, seq_id: int, hashes: Sequence[bytes], limit_pages: int) -> PageRun:
        """Start a run with the leading pages that L1 holds, at most `limit_pages`, and lock them.

        Counts as a hit of the nodes used. Raises InvariantError when `seq_id` is open already.
        """
        if seq_id in self._runs:
            raise InvariantError(f"sequence {seq_id} is open already")
        run = self._runs[seq_id] = PageRun(seq_id, self._tree.root, 0, [])
        self._take_cached(run, hashes, limit_pages)
        return run

    def adopt(self, run: PageRun, hashes: Sequence[bytes], limit_pages: int) -> int:
        """Take what has come into the tree behind the run's cached pages since; gives how many pages.

        `hashes` and `limit_pages` count from the sequence's first page, as for `open`. Raises InvariantError while the
        run has private pages.
        """
        self._demand_open(run)
        if len(run.pages) != run.num_cached:
            raise InvariantError(f"sequence {run.seq_id} adopts pages while it has {_num_private(run)} private ones")
        return self._take_cached(run, hashes, limit_pages)

    def _take_cached(self, run: PageRun, hashes: Sequence[bytes], limit_pages: int) -> int:
        tree, start = self._tree, run.num_cached
        end = tree.l1_match(hashes, limit_pages, start)
        if end <= start:
            return 0
        node = tree.node_ending_with(hashes[end - 1], end)
        run.pages += tree.l1_lock_path(node, run.node, self._tick, is_hit=True)
        run.node, run.num_cached = node, end
        return end - start

    def has_room(self, run: PageRun, num_pages: int, keep_free: int) -> bool:
        """Whether `allocate(run, num_pages)` would leave `keep_free` pages free or evictable in every lane."""
        need = owner_counts(len(run.pages), num_pages, self.config.num_owners)
        room = zip(self._l1.free(), self._tree.l1_evictable, need, strict=True)
        return all(free + evictable - pages >= keep_free for free, evictable, pages in room)

    def has_room_to_open(self, hashes: Sequence[bytes], num_cached: int, num_pages: int, keep_free: int) -> bool:
        """Whether `open` with `num_cached` cached pages, then `has_room(run, num_pages, keep_free)`, would hold.

        Changes nothing: a request that has to wait is no hit, however often it is looked at. `num_cached` is `probe`'s.
        """
        locked = (
            self._tree.l1_unlocked(hashes[num_cached - 1], num_cached) if num_cached else [0] * self.config.num_owners
        )
        need = owner_counts(num_cached, num_pages, self.config.num_owners)
        room = zip(self._l1.free(), self._tree.l1_evictable, locked, need, strict=True)
        return all(free + evictable - path - pages >= keep_free for free, evictable, path, pages in room)

    def allocate(self, run: PageRun, num_pages: int) -> bool:
        """Append private pages to the run, evicting what the planner picks for exactly what is short.

        Gives False, with nothing changed at all, when a lane would not have enough even so.
        """
        self._demand_open(run)
        start = len(run.pages)
        need = owner_counts(start, num_pages, self.config.num_owners)
        short = [max(0, pages - free) for pages, free in zip(need, self._l1.free(), strict=True)]
        if any(short):
            if any(lack > evictable for lack, evictable in zip(short, self._tree.l1_evictable, strict=True)):
                return False
            self._evict(short)
        run.pages += self._l1.reserve(start, num_pages)
        return True

    def commit(self, run: PageRun, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Give the run's next private pages, whose writes are launched, to the tree under these hashes.

        A page that the tree has already is a duplicate: the run takes the tree's page and frees its own. Gives those,
        as (page index in the sequence, its page from now on). Raises InvariantError for more hashes than private pages.
        """
        self._demand_open(run)
        if len(hashes) > _num_private(run):
            raise InvariantError(f"sequence {run.seq_id}: {len(hashes)} pages committed, {_num_private(run)} private")
        if not hashes:
            return []
        tree, start = self._tree, run.num_cached
        known = tree.l1_match(hashes, len(hashes))
        replaced: list[tuple[int, int]] = []
        if known:
            middle = start + known
            node = tree.node_ending_with(hashes[known - 1], middle)
            theirs = tree.l1_lock_path(node, run.node, self._tick, is_hit=False)
            self._l1.release(start, run.pages[start:middle])
            run.pages[start:middle] = theirs
            run.node, run.num_cached = node, middle
            replaced = list(enumerate(theirs, start))
        if known < len(hashes):
            end = start + len(hashes)
            new = tuple(run.pages[run.num_cached : end])
            run.node = tree.insert(run.node, tuple(hashes[known:]), new, self._tick, locks=1)
            run.num_cached = end
        return replaced

    def close(self, run: PageRun) -> None:
        """End a run: its cached pages stay in the tree without its lock, its private ones are freed."""
        self._demand_open(run)
        del self._runs[run.seq_id]
        self._tree.l1_unlock_path(run.node, self._tick)
        self._l1.release(run.num_cached, run.pages[run.num_cached :])
        run.node, run.num_cached, run.pages = self._tree.root, 0, []

    def _demand_open(self, run: PageRun) -> None:
        if self._runs.get(run.seq_id) is not run:
            raise InvariantError(f"sequence {run.seq_id} is not open in this core")

    # --- eviction -----------------------------------------------------------------------------------------------------

    def evict_to_watermark(self) -> int:
        """Background eviction: refill the lanes when one has fewer free pages than the watermark; gives pages evicted.

        Refills beyond the watermark, so that the next ticks find room without a plan
        (docs/decisions/0002-eviction-hysteresis.md).
        """
        free = self._l1.free()
        if min(free) >= self.config.l1_free_pages:
            return 0
        lacks = (max(0, self._refill_to - pages) for pages in free)
        deficits = [min(lack, evictable) for lack, evictable in zip(lacks, self._tree.l1_evictable, strict=True)]
        return self._evict(deficits) if any(deficits) else 0

    def _evict(self, deficits: Sequence[int]) -> int:
        plan = plan_eviction(list(self._tree.l1_leaves.values()), deficits)
        if any(plan.remaining):
            raise InvariantError(f"{deficits} pages were evictable, the planner left {plan.remaining} open")
        for victim in plan.victims:
            self._l1.release(*self._tree.l1_remove(victim))
        num_pages = sum(plan.planned_freed)
        self.evicted_pages += num_pages
        return num_pages

    def flush(self) -> tuple[int, int]:
        """Drop every cached page that no running sequence uses; gives (pages dropped, cached pages kept)."""
        tree = self._tree
        dropped = 0
        while tree.l1_leaves:
            for node_id in list(tree.l1_leaves):
                first, pages = tree.l1_remove(node_id)
                self._l1.release(first, pages)
                dropped += len(pages)
        return dropped, sum(tree.l1_cached)

    # --- state --------------------------------------------------------------------------------------------------------

    def lanes(self) -> list[LaneCounts]:
        """The page counts of each lane, in the order of owners."""
        total = self.config.l1_pages
        return [
            LaneCounts(total=total, free=free, cached=cached, private=total - free - cached, locked=cached - evictable)
            for free, cached, evictable in zip(
                self._l1.free(), self._tree.l1_cached, self._tree.l1_evictable, strict=True
            )
        ]

    def digest(self) -> bytes:
        """SHA-256 of everything that future decisions depend on: equal on all ranks, or the ranks have parted."""
        runs = [(run.seq_id, run.node.id, run.num_cached, run.pages) for run in self._runs.values()]
        return digest_core(self._tick, self.evicted_pages, self._tree, self._l1, runs)

    def check(self) -> None:
        """Every invariant, from scratch; for tests. Raises InvariantError."""
        self._tree.check()
        self._l1.check()
        cached = ((node.first, node.l1.pages) for node in self._tree.nodes.values())
        private = ((run.num_cached, run.pages[run.num_cached :]) for run in self._runs.values())
        self._check_every_page_has_one_owner(chain(cached, private))
        locks = {self._tree.root.id: 1} | dict.fromkeys(self._tree.nodes, 0)
        for run in self._runs.values():
            pages: tuple[int, ...] = ()
            for node in self._tree.l1_path(run.node, self._tree.root):
                locks[node.id] += 1
                pages = node.l1.pages + pages
            if run.node.end != run.num_cached or list(pages) != run.pages[: run.num_cached]:
                raise InvariantError(f"sequence {run.seq_id}: its cached pages are not those of its path")
        for node in self._tree.nodes.values():
            if node.l1.locks != locks[node.id]:
                raise InvariantError(f"node {node.id}: {node.l1.locks} locks, {locks[node.id]} runs go through it")

    def _check_every_page_has_one_owner(self, held: Iterable[tuple[int, Sequence[int]]]) -> None:
        num_owners = self.config.num_owners
        found = [bytearray(self.config.l1_pages) for _ in range(num_owners)]
        for first, pages in held:
            for offset, page in enumerate(pages):
                owner = (first + offset) % num_owners
                if found[owner][page] or not self._l1[owner].is_live(page):
                    raise InvariantError(f"lane {owner}: page {page} is held twice, or held while it is free")
                found[owner][page] = 1
        for owner in range(num_owners):
            if sum(found[owner]) + self._l1[owner].num_free != self.config.l1_pages:
                raise InvariantError(f"lane {owner}: a page has leaked")


def _num_private(run: PageRun) -> int:
    return len(run.pages) - run.num_cached
