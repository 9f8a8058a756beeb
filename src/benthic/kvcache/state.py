"""What the parts of the core share: tree, free lists, operations in flight, the tick, and the commands of this tick."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benthic.common.layout import ceil_div
from benthic.kvcache.commands import Command, Stream
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.lanes import Lanes
from benthic.kvcache.operations import InFlight
from benthic.kvcache.planner import Holding, plan_eviction
from benthic.kvcache.tree import MAX_NODE_PAGES, RadixTree

WRITE_THROUGH, WRITE_THROUGH_SELECTIVE, WRITE_BACK = "write_through", "write_through_selective", "write_back"
POLICIES = (WRITE_THROUGH, WRITE_THROUGH_SELECTIVE, WRITE_BACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Sizes that all ranks have agreed on. Raises ValueError for what can't be."""

    num_owners: int
    l1_pages: int  # of each lane
    l1_free_pages: int  # of each lane: background eviction keeps this many free
    l2_frames: int = 0  # of each lane; 0: no host tier
    policy: str = WRITE_THROUGH
    selective_hits: int = 2  # write_through_selective backs a node up at so many hits
    disk: bool = False
    staging_frames: int = 0  # of each lane: buffers between L2 and the disk
    spill_max_inflight: int = 64  # operations
    spill_min_hits: int = 0
    reload_max_inflight: int = 8  # operations, draining ones included
    reload_timeout_us: int = 2_000_000
    reload_min_pages: int = 1
    reload_sample_pages: int = 16  # of each owner, read first while the disk's rate is not known
    reload_marks: bool = True  # reloaded pages count as on disk; False: some lie in another owner's file, and move

    def __post_init__(self) -> None:
        if self.num_owners < 1 or self.l1_pages < 1:
            raise ValueError(f"a core needs an owner and a page; got {self.num_owners} owners, {self.l1_pages} pages")
        if not 0 <= self.l1_free_pages <= self.l1_pages:
            raise ValueError(f"free-room watermark of {self.l1_free_pages} pages in a lane of {self.l1_pages}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}: must be one of {', '.join(POLICIES)}")
        if self.disk and not self.l2_frames:
            raise ValueError("a disk floor needs a host tier")
        if self.disk and min(self.spill_max_inflight, self.reload_max_inflight) < 1:
            raise ValueError("a disk floor needs a spill and a reload in flight")
        least = ceil_div(MAX_NODE_PAGES, self.num_owners)
        if self.disk and self.staging_frames < least:
            raise ValueError(f"{self.staging_frames} staging frames: a node may have {least} pages of one owner")


@dataclass(slots=True)
class Counters:
    """Since the start, in pages unless said; flushes don't count as evictions."""

    evicted_l1: int = 0
    evicted_l2: int = 0
    backed_up: int = 0
    backup_failed: int = 0
    backup_skipped: int = 0
    loaded_back: int = 0
    spill_nodes_lost: int = 0
    durable: int = 0
    durable_failed_ops: int = 0
    reloads: int = 0
    reloaded: int = 0
    reload_timeouts: int = 0
    holds: int = 0


@dataclass(slots=True)
class CoreState:
    """Owned by the core; its parts change it, each what its module says."""

    config: CoreConfig
    tree: RadixTree
    l1: Lanes
    l2: Lanes
    ops: InFlight = field(default_factory=InFlight)
    commands: list[Command] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    tick: int = 0
    now_us: int = 0  # the tick clock
    read_us_per_page: int = 0  # rank 0's measured rates, broadcast; 0: not known. Of a sequence's page: all owners read
    compute_us_per_page: int = 0
    admissions: int = 0  # runs opened so far; the number of one is the age of its pages on disk

    def evict_l1(self, deficits: Sequence[int]) -> int:
        """Free L1 pages by plan, without copies; gives pages. Raises InvariantError when less is evictable."""
        plan = plan_eviction(list(self.tree.l1.leaves.values()), deficits)
        if any(plan.remaining):
            raise InvariantError(f"{deficits} pages were evictable, the planner left {plan.remaining} open")
        for victim in plan.victims:
            node = self.tree.nodes[victim]
            self.l1.release(node.first, self.tree.l1_remove(node))
        num_pages = sum(plan.planned_freed)
        self.counters.evicted_l1 += num_pages
        return num_pages

    def reserve_l2(
        self, first: int, num_pages: int, counts: Sequence[int], keep: Holding | None = None
    ) -> tuple[int, ...] | None:
        """Frames for the pages `first …`, evicting by plan; None, with nothing changed, if there are too few.

        A plan looks at every leaf of L2, so it makes room for what the next ones will ask as well: a 64th of each lane.
        Neither `keep` nor what is above it is evicted.
        """
        if any(need > free for need, free in zip(counts, self.l2.free(), strict=True)):
            if keep is not None:
                self.tree.l2.lock(keep)
            has_room = self._evict_l2(counts)
            if keep is not None:
                self.tree.l2.unlock(keep)
            if not has_room:
                return None
        return tuple(self.l2.reserve(first, num_pages))

    def _evict_l2(self, counts: Sequence[int]) -> bool:
        """Make room for so many frames a lane, and ahead; False, with nothing changed, if that can't be."""
        tree, ahead = self.tree, self.config.l2_frames // 64
        lanes = list(zip(counts, self.l2.free(), tree.l2.evictable, strict=True))
        if any(need > free + evictable for need, free, evictable in lanes):
            return False
        deficits = [min(max(0, need + ahead - free), evictable) for need, free, evictable in lanes]
        plan = plan_eviction(list(tree.l2.leaves.values()), deficits)
        if any(plan.remaining):
            raise InvariantError(f"{deficits} frames were evictable, the planner left {plan.remaining} open")
        for victim in plan.victims:
            node = tree.nodes[victim]
            self.l2.release(node.first, tree.l2_remove(node))
        self.counters.evicted_l2 += sum(plan.planned_freed)
        return True

    def in_stream(self, stream: Stream) -> bool:
        """Whether the stream has operations in flight."""
        return bool(self.ops.of(stream))
