"""`POST /cache/flush`: L1 and L2 at once, in one tick; L3 when what is in flight there has settled."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benthic.kvcache.commands import ClearDisk, OpId, Stream
from benthic.kvcache.operations import Operation
from benthic.kvcache.reload import Reloads
from benthic.kvcache.spill import Spills
from benthic.kvcache.state import CoreState

DISK_STREAMS = (Stream.GATHER, Stream.DURABLE, Stream.LOOKUP, Stream.RELOAD, Stream.DRAIN)
PATIENCE_US = 30_000_000  # then the client gets its answer; the flush itself goes on


@dataclass(frozen=True, slots=True)
class Flushed:
    """Pages dropped and kept, by tier."""

    dropped: dict[str, int]
    kept: dict[str, int]


@dataclass(frozen=True, slots=True)
class DiskFlushed:
    """The end of a flush of L3 for whoever asked; `late`: it is still held up."""

    token: int
    late: bool


@dataclass(slots=True)
class DiskFlushes:
    """Owns the flush of L3 under way, if any; changes the shared state."""

    state: CoreState
    spills: Spills
    reloads: Reloads
    asked: dict[int, int] = field(default_factory=dict)  # token -> when its patience ends
    done: list[DiskFlushed] = field(default_factory=list)
    clearing: OpId = 0
    pending: bool = False

    @property
    def waiting(self) -> bool:
        """Whether a flush is under way."""
        return self.pending

    def flush(self, tiers: Sequence[str]) -> Flushed:
        """Drop what L1 and L2, where named, can let go of."""
        s, tree = self.state, self.state.tree
        dropped: dict[str, int] = {}
        kept: dict[str, int] = {}
        for name, tier, lanes, remove in (
            ("l1", tree.l1, s.l1, tree.l1_remove),
            ("l2", tree.l2, s.l2, tree.l2_remove),
        ):
            if name not in tiers:
                continue
            dropped[name] = 0
            while tier.leaves:
                for node_id in list(tier.leaves):
                    node = tree.nodes[node_id]
                    pages = remove(node)
                    lanes.release(node.first, pages)
                    dropped[name] += len(pages)
            kept[name] = sum(tier.cached)
        return Flushed(dropped, kept)

    def ask(self, token: int) -> None:
        """Start to flush L3, or join the flush under way."""
        self.asked[token] = self.state.now_us + PATIENCE_US
        self.pending = self.spills.stopped = self.reloads.stopped = True

    def advance(self) -> None:
        """Issue the one operation when nothing else is in flight on disks; answer those whose patience has ended."""
        if not self.pending:
            return
        s = self.state
        if not self.clearing and not any(s.in_stream(stream) for stream in DISK_STREAMS):
            op = s.ops.issue(Stream.DRAIN, 0, 0, s.tree.root)
            self.clearing = op.id
            s.commands.append(ClearDisk(op=op.id))
        for token, until_us in list(self.asked.items()):
            if s.now_us > until_us:
                self.done.append(DiskFlushed(token, True))
                del self.asked[token]

    def settled(self, op: Operation) -> bool:
        """Whether this is the end of the flush; if so, everybody is answered and the disk is used again."""
        if op.id != self.clearing:
            return False
        self.spills.forget_disk()
        self.done += [DiskFlushed(token, False) for token in self.asked]
        self.asked = {}
        self.clearing = 0
        self.pending = self.spills.stopped = self.reloads.stopped = False
        return True

    def take_done(self) -> list[DiskFlushed]:
        """Flushes that are over since the last call."""
        done = self.done
        self.done = []
        return done
