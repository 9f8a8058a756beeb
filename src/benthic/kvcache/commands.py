"""What the core tells the tier workers to do, and what they answer: plain data, equal on every rank.

A command names all pages of an operation, `first` being the absolute index of the first; a worker carries out those
that its rank owns (`owner_of(first + i, num_owners)`), and reports one number for the whole operation:

    backup, gather, durable    1 failed, 2 done
    load-back, drain           2 done
    lookup, reload             1 + n, n = position in the operation of the first page that this rank owns and can't
                               give, else the operation's length

A rank that owns no page of an operation reports it done. Before an operation's deadline a rank reports only when none
of its own I/O for the operation is running any more, after an early failure too.
"""

from dataclasses import dataclass
from enum import IntEnum

OpId = int

FAILED, DONE = 1, 2


class Stream(IntEnum):
    """Operations of one stream stand in one order. Copy streams settle in it, disk streams in any."""

    BACKUP = 0
    LOADBACK = 1
    GATHER = 2
    DURABLE = 3
    LOOKUP = 4
    RELOAD = 5
    DRAIN = 6


SETTLES_IN_ORDER = (Stream.BACKUP, Stream.LOADBACK, Stream.GATHER)
COUNTS = (Stream.LOOKUP, Stream.RELOAD)  # report 1 + n


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """Copy L1 pages to L2 frames, behind the last forward launched in the tick of the command."""

    op: OpId
    first: int
    pages: tuple[int, ...]  # L1, in the owner's lane
    frames: tuple[int, ...]  # L2, in the owner's lane


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBack:
    """Copy L2 frames to L1 pages, behind the last forward launched before the command."""

    op: OpId
    first: int
    frames: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Gather L2 frames into staging buffers (reported as `gather`), then write and sync them (reported as `durable`).

    A gather that fails fails the write too. `age` orders the pages for collecting (the admission's number).
    """

    gather: OpId
    durable: OpId
    first: int
    frames: tuple[int, ...]
    hashes: tuple[bytes, ...]
    age: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Say how many leading pages the disk can vouch for."""

    op: OpId
    first: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """Read pages from the disk into L2 frames and verify them.

    Past its deadline the core settles the operation with what is verified by then; a read not yet begun is dropped, and
    a `Drain` follows if frames are left over.
    """

    op: OpId
    first: int
    frames: tuple[int, ...]
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Report when no I/O of this rank touches the frames of the settled reload any more."""

    op: OpId
    reload: OpId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearDisk:
    """Empty index, slots and LRU, with no other disk operation in flight. Settles in the drain stream."""

    op: OpId


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """An admission has used these pages, from whichever tier they came: they are as old as `age`. No answer."""

    first: int
    hashes: tuple[bytes, ...]
    age: int


Command = Backup | LoadBack | Spill | Lookup | Reload | Drain | ClearDisk | Touch


@dataclass(frozen=True, slots=True)
class Completion:
    """Rank-local: this rank's part of the operation is over, with this value."""

    op: OpId
    value: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """Replicated: the operation is over on every rank. Only `agree` makes these."""

    op: OpId
    value: int
