"""L1 -> L2: which nodes are backed up when, and what becomes of them; and L2 -> L1, whose operations mirror it.

A backup is reserved and attached in the tick in which its pages enter the tree (or are hit, or leave L1 under
write-back), from replicated state alone. From then on `node.backup` names it, and only its agreed end clears that.
"""

from benthic.kvcache.commands import DONE, Agreed, Backup, LoadBack, Stream
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.operations import Operation
from benthic.kvcache.state import WRITE_BACK, WRITE_THROUGH_SELECTIVE, CoreState
from benthic.kvcache.tree import Node


class Copies:
    """Decides about copies between L1 and L2. Owns nothing; changes the shared state."""

    def __init__(self, state: CoreState) -> None:
        self._s = state

    # --- when ---------------------------------------------------------------------------------------------------------

    def entered(self, nodes: list[Node]) -> None:
        """Nodes have entered the tree, uppermost first: write-through backs them up if their parent is."""
        config = self._s.config
        if not config.l2_frames or config.policy != "write_through":
            return
        for node in nodes:
            if not self.back_up(node):
                break  # nothing below can have a copy either

    def hit(self, bottom: Node) -> None:
        """A path was hit: back up what of it lacks a copy (a backup failed or was skipped, or its time has come)."""
        config = self._s.config
        if not config.l2_frames or config.policy == WRITE_BACK or bottom.l2 is not None:
            return  # closed under prefix: all above has one too
        least = config.selective_hits if config.policy == WRITE_THROUGH_SELECTIVE else 0
        for node in self._without_copy(bottom):
            if node.hits < least or not self.back_up(node):
                break

    def want_copy(self, bottom: Node) -> bool:
        """Back up the path whatever the policy; False if something of it could not be."""
        return bottom.l2 is not None or all(self.back_up(node) for node in self._without_copy(bottom))

    def _without_copy(self, bottom: Node) -> list[Node]:
        nodes = []
        node = bottom
        while node.l2 is None:
            nodes.append(node)
            assert node.parent is not None
            node = node.parent
        nodes.reverse()
        return nodes

    def back_up(self, node: Node) -> bool:
        """Reserve frames and attach the backup. False: no room, or the parent has no copy in L2 and gets none."""
        s, tree = self._s, self._s.tree
        parent = node.parent
        assert parent is not None
        assert node.l1 is not None
        if node.l2 is not None:
            raise InvariantError(f"node {node.id} has frames already, or is being backed up")
        if parent.l2 is None:
            s.counters.backup_skipped += len(node.hashes)
            return False
        node.check()
        # victims never come from the copy's own path
        frames = s.reserve_l2(node.first, len(node.hashes), node.l1.counts, keep=parent.l2)
        if frames is None:
            s.counters.backup_skipped += len(node.hashes)
            return False
        op = s.ops.issue(Stream.BACKUP, node.first, len(node.hashes), node)
        tree.l2_attach(node, frames, node.l1.last_access)
        assert node.l2 is not None
        node.backup = op.id
        tree.l1.lock(node.l1)
        tree.l2.lock(node.l2)
        s.commands.append(Backup(op=op.id, first=op.first, pages=node.l1.pages, frames=frames))
        return True

    def load_back(self, bottom: Node, first: int, pages: tuple[int, ...]) -> Operation:
        """L1 gets copies of everything from page `first` to the end of `bottom`, which is in L2 alone."""
        s, tree = self._s, self._s.tree
        nodes = tree.nodes_of(bottom, first)
        op = s.ops.issue(Stream.LOADBACK, first, bottom.end - first, bottom)
        frames: list[int] = []
        for node in nodes:
            if not node.in_l2 or node.l1 is not None:
                raise InvariantError(f"node {node.id} can't be loaded back: no complete copy in L2, or one in L1")
            assert node.l2 is not None
            start = node.first - first
            tree.l1_attach(node, pages[start : start + len(node.hashes)], s.tick)
            node.load_back = op.id
            frames += node.l2.pages
        assert bottom.l1 is not None
        assert bottom.l2 is not None
        tree.l1.lock(bottom.l1)
        tree.l2.lock(bottom.l2)
        s.commands.append(LoadBack(op=op.id, first=first, frames=tuple(frames), pages=pages))
        return op

    # --- and then -----------------------------------------------------------------------------------------------------

    def settle_load_back(self, op: Operation, agreed: Agreed) -> None:
        """The pages are in L1 on every rank."""
        if agreed.value != DONE:
            raise InvariantError(f"load-back {op.id} failed: a forward may stand on it")
        tree = self._s.tree
        for node in tree.nodes_of(op.bottom, op.first):
            if node.load_back != op.id:
                raise InvariantError(f"node {node.id} is not under load-back {op.id}")
            node.load_back = 0
        assert op.bottom.l1 is not None
        assert op.bottom.l2 is not None
        tree.l1.unlock(op.bottom.l1)
        tree.l2.unlock(op.bottom.l2)
        self._s.counters.loaded_back += op.num_pages

    def settle_backup(self, op: Operation, agreed: Agreed) -> list[Node]:
        """The frames are complete on every rank, or some rank failed; gives the nodes that have a copy now."""
        s, tree = self._s, self._s.tree
        assert op.bottom.l1 is not None
        if op.rolled_back or agreed.value != DONE:
            if not op.rolled_back:
                self._roll_back(op)
            s.l2.release(op.first, op.frames)  # only now: its copies may have been under way
            s.counters.backup_failed += op.num_pages
            tree.l1.unlock(op.bottom.l1)
            for node in tree.nodes_of(op.bottom, op.first):
                node.leaving = False  # write-back: it stays where it is and may be chosen again
            return []
        nodes = tree.nodes_of(op.bottom, op.first)
        for node in nodes:
            if node.backup != op.id:
                raise InvariantError(f"node {node.id} is not under backup {op.id}")
            node.check()
            node.backup = 0
        assert op.bottom.l2 is not None
        tree.l1.unlock(op.bottom.l1)
        tree.l2.unlock(op.bottom.l2)
        s.counters.backed_up += op.num_pages
        return nodes

    def _roll_back(self, failed: Operation) -> None:
        """Take the frames of this backup, and of those below it in the stream, out of the tree; deepest first."""
        tree = self._s.tree
        gone = {node.id: node for node in tree.nodes_of(failed.bottom, failed.first)}
        in_flight = self._s.ops.of(Stream.BACKUP).values()
        below = [op for op in in_flight if not op.rolled_back and self._is_below(op, gone)]
        for op in [*reversed(below), failed]:
            nodes = tree.nodes_of(op.bottom, op.first)
            assert op.bottom.l2 is not None
            tree.l2.unlock(op.bottom.l2)
            frames: list[int] = []
            for node in reversed(nodes):
                node.backup = 0
                frames[:0] = tree.l2_remove(node)
            op.frames = tuple(frames)
            op.rolled_back = True

    def _is_below(self, op: Operation, above: dict[int, Node]) -> bool:
        """Whether the operation's path goes through one of these nodes (a branch may hang on an upper half)."""
        node: Node | None = op.bottom
        while node is not None and node.id not in above:
            node = node.parent
        return node is not None

    # --- write-back ---------------------------------------------------------------------------------------------------

    def let_go(self, victims: list[Node]) -> None:
        """Background eviction under write-back: drop what has a copy, back up the rest and drop it when that settles.

        `victims` are in the planner's order, children first; what stays meanwhile is in `leaving_pages`.
        """
        for node in victims:
            assert node.l1 is not None
            has_copy = node.l2 is not None or self.want_copy(node)
            if node.l1.children or node.l1.locks or (has_copy and not node.in_l2):
                node.leaving = True
            else:  # it has a copy, or L2 has no room for one
                self._drop(node)

    def _drop(self, node: Node) -> None:
        s = self._s
        s.counters.evicted_l1 += len(node.hashes)
        s.l1.release(node.first, s.tree.l1_remove(node))

    def drop_leaving(self, node: Node) -> None:
        """The node's backup has settled: L1 lets it go, and what above it was leaving too, unless it was hit since."""
        at: Node | None = node
        while at is not None and at.leaving and at.l1 is not None and not at.l1.locks and not at.l1.children:
            above = at.parent
            self._drop(at)
            at = above

    def leaving_pages(self) -> list[int]:
        """L1 pages by owner that write-back lets go as soon as their copies have settled."""
        leaving: dict[int, Node] = {}
        for op in self._s.ops.of(Stream.BACKUP).values():
            node: Node | None = op.bottom
            while node is not None and node.leaving and node.id not in leaving:
                leaving[node.id] = node
                node = node.parent
        total = [0] * self._s.config.num_owners
        for node in leaving.values():
            if node.l1 is not None:
                total = [t + c for t, c in zip(total, node.l1.counts, strict=True)]
        return total
