"""L2 -> L3: what is listed, when its gather is issued, and when spilling pauses.

Every node that gets its copy in L2 is listed, in that order. The list protects nothing: a node that L2 drops before its
turn leaves the list and is counted as lost. A gather protects its frames, and is issued only while they fit every
lane's free staging buffers, so a stalled disk costs cache and never memory.
"""

from benthic.common.layout import owner_counts
from benthic.kvcache.commands import DONE, Agreed, Spill, Stream
from benthic.kvcache.operations import Operation
from benthic.kvcache.state import CoreState
from benthic.kvcache.tree import Node

FAILURES_TO_SUSPEND = 8  # agreed durable failures in a row
FIRST_PAUSE_US = 60_000_000  # doubled at each trial that fails
LONGEST_PAUSE_US = 3_600_000_000


class Spills:
    """Owns the list, the count of staging buffers and the pause; changes the shared state."""

    def __init__(self, state: CoreState) -> None:
        self._s = state
        self.listed: dict[int, Node] = {}  # by node id, in their turn
        self.staging_free = [state.config.staging_frames] * state.config.num_owners
        self.failures = 0  # agreed durable failures in a row
        self.paused_until_us = 0
        self.pause_us = 0  # 0: not suspended
        self.trial = 0  # the one operation that tries whether the pause can end
        self.stopped = False  # a flush of L3 waits for what is in flight

    @property
    def suspended(self) -> bool:
        """Whether spilling pauses after failures. A pause that has run out lets one operation try."""
        return self.pause_us > 0

    @property
    def working(self) -> bool:
        """Whether the list will shrink by itself: ticks go on for it."""
        return bool(self.listed) and not self.stopped and not (self.suspended and self._s.now_us < self.paused_until_us)

    def hit(self, bottom: Node) -> None:
        """A path was hit: list what of it is in L2 and neither on disk nor on its way there."""
        if not self._s.config.disk:
            return
        missing = []
        node = bottom
        while node.parent is not None:
            if node.in_l2:
                missing.append(node)
            node = node.parent
        for node in reversed(missing):
            self.list(node)

    def list(self, node: Node) -> None:
        """Put the node, which is in L2, at the end of the list, unless it is there, on disk or on its way."""
        config = self._s.config
        if config.disk and node.hits >= config.spill_min_hits and not node.durable and not node.spill:
            self.listed[node.id] = node

    def split(self, node: Node, upper: Node) -> None:
        """`node` has lost its first pages to `upper`: both are listed (`issue` takes what is above first)."""
        if node.id in self.listed:
            self.listed[upper.id] = upper

    def forget(self, node: Node) -> None:
        """L2 has dropped the node."""
        if self.listed.pop(node.id, None) is not None:
            self._s.counters.spill_nodes_lost += 1

    def issue(self) -> None:
        """Gathers for the head of the list, as far as buffers, bounds and the pause allow."""
        s = self._s
        if self.stopped or not self.listed:
            return
        bound = s.config.spill_max_inflight
        if self.suspended:
            if s.now_us < self.paused_until_us:
                return
            bound = 1  # one try
        while self.listed and len(s.ops.of(Stream.DURABLE)) < bound:
            node = self._topmost_missing(next(iter(self.listed.values())))
            if node.durable or node.spill:
                del self.listed[node.id]
            elif not self._gather(node):
                return

    def _topmost_missing(self, node: Node) -> Node:
        """The node itself, or the uppermost in a row above it that are neither on disk nor on the way."""
        top = node
        above = node.parent
        while above is not None and not above.durable and not above.spill:
            top = above
            above = above.parent
        return top

    def _gather(self, node: Node) -> bool:
        s = self._s
        counts = owner_counts(node.first, len(node.hashes), s.config.num_owners)
        if any(need > free for need, free in zip(counts, self.staging_free, strict=True)):
            return False
        node.check()
        assert node.l2 is not None
        self.listed.pop(node.id, None)
        gather = s.ops.issue(Stream.GATHER, node.first, len(node.hashes), node)
        durable = s.ops.issue(Stream.DURABLE, node.first, len(node.hashes), node)
        gather.partner = durable.id
        node.spill = durable.id
        if self.suspended:
            self.trial = durable.id
        s.tree.l2.lock(node.l2)
        self.staging_free = [free - need for free, need in zip(self.staging_free, counts, strict=True)]
        s.commands.append(
            Spill(
                gather=gather.id,
                durable=durable.id,
                first=node.first,
                frames=node.l2.pages,
                hashes=node.hashes,
                age=node.age,
            )
        )
        return True

    def settle_gather(self, op: Operation) -> None:
        """The frames are in staging buffers on every rank (or a rank failed): L2's protection ends."""
        assert op.bottom.l2 is not None
        self._s.tree.l2.unlock(op.bottom.l2)

    def settle_durable(self, op: Operation, agreed: Agreed) -> None:
        """The pages are on every rank's disk for good, or some rank failed."""
        s = self._s
        counts = owner_counts(op.first, op.num_pages, s.config.num_owners)
        self.staging_free = [free + got for free, got in zip(self.staging_free, counts, strict=True)]
        ok = agreed.value == DONE
        for node in s.tree.nodes_of(op.bottom, op.first):
            if node.spill != op.id:
                continue  # it has left the tree and come back
            node.spill = 0
            above = node.parent
            if ok and above is not None and (above.durable or above.spill):  # else its head failed: no use as a tail
                node.durable = True
        if ok:
            s.counters.durable += op.num_pages
            self.failures = self.pause_us = self.paused_until_us = self.trial = 0
            return
        s.counters.durable_failed_ops += 1
        self.failures += 1
        if op.id == self.trial:
            self._pause(min(LONGEST_PAUSE_US, 2 * self.pause_us))
        elif self.failures >= FAILURES_TO_SUSPEND and not self.suspended:
            self._pause(FIRST_PAUSE_US)

    def _pause(self, pause_us: int) -> None:
        """Nothing is issued meanwhile; what was under way may still fail, which says nothing new."""
        self.pause_us, self.trial = pause_us, 0
        self.paused_until_us = self._s.now_us + pause_us

    def forget_disk(self) -> None:
        """The disk was emptied: nothing is on it any more."""
        for node in self._s.tree.nodes.values():
            node.durable = False
