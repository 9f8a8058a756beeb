"""Operations in flight: what tier workers have been told and have not all finished. Replicated, in replicated order."""

from dataclasses import dataclass, field

from benthic.kvcache.commands import OpId, Stream
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.tree import Node


@dataclass(slots=True, eq=False)
class Operation:
    """One operation. `bottom` and `first` name its nodes for ever: splits put new nodes between the two.

    What it touches is protected until it is settled: by locks on the paths to `bottom` in the tiers named, or because
    `frames` belong to the operation alone.
    """

    id: OpId
    stream: Stream
    first: int  # absolute index of the first page
    num_pages: int
    bottom: Node
    frames: tuple[int, ...] = ()  # of the operation alone: a reload's, a drain's, a rolled-back backup's
    hashes: tuple[bytes, ...] = ()
    deadline_us: int = 0  # lookup and reload
    rolled_back: bool = False  # a backup whose parent's failed: settles, but fills nothing
    partner: OpId = 0  # a gather's durable, a drain's reload


@dataclass(slots=True)
class InFlight:
    """All operations, by id (rising) and by stream. Owned by the core."""

    ops: dict[OpId, Operation] = field(default_factory=dict)
    streams: tuple[dict[OpId, Operation], ...] = field(default_factory=lambda: tuple({} for _ in Stream))
    next_id: OpId = 1

    def issue(self, stream: Stream, first: int, num_pages: int, bottom: Node) -> Operation:
        """A new operation at the end of its stream."""
        op = Operation(self.next_id, stream, first, num_pages, bottom)
        self.next_id += 1
        self.ops[op.id] = op
        self.streams[stream][op.id] = op
        return op

    def remove(self, op: Operation) -> None:
        """It is settled. Raises InvariantError if it was not in flight."""
        if self.ops.pop(op.id, None) is not op:
            raise InvariantError(f"operation {op.id} settles and is not in flight")
        del self.streams[op.stream][op.id]

    def of(self, stream: Stream) -> dict[OpId, Operation]:
        """The stream's operations in order; not to be changed."""
        return self.streams[stream]

    def windows(self) -> tuple[tuple[OpId, ...], ...]:
        """The ids in each stream, in order: the layout of the agreement's vector."""
        return tuple(tuple(stream) for stream in self.streams)
