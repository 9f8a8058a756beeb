"""What the disk's threads hand to each other: pages on their way to and from the disk, and messages to the keeper."""

from dataclasses import dataclass, field

from benthic.kvcache.commands import ClearDisk, Lookup, OpId, Reload, Touch
from benthic.tiers.disk.format import Verdict
from benthic.tiers.disk.slab import Slab
from benthic.tiers.disk.staging import StagingBuffer

Hash = bytes


def own_positions(first: int, num_pages: int, lane: int, num_lanes: int) -> range:
    """Which positions of an operation lie in `lane`: those i with owner_of(first + i, num_lanes) == lane."""
    return range((lane - first) % num_lanes, num_pages, num_lanes)


@dataclass(slots=True, eq=False)
class SpillOp:
    """A spill under way: durable when no page of it is outstanding. Changed by the keeper's thread alone."""

    durable: OpId
    outstanding: int = 0
    failed: bool = False


@dataclass(slots=True, eq=False)
class StagedPage:
    """A page in a staging buffer."""

    hash: Hash
    position: int  # absolute, in the sequence
    buffer: StagingBuffer


@dataclass(slots=True, eq=False)
class PageWrite:
    """A page that has a slot, until it is durable or has failed. The keeper's: all but `page` and `slot`."""

    page: StagedPage
    slot: int
    age: int
    waiters: list[SpillOp] = field(default_factory=list)
    doubtful: bool = False  # a sync failed while it was under way


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page lies: which file, which slot, and for this rank's own file the slot's generation."""

    slab: Slab
    slot: int
    generation: int  # how often the slot has changed hands; -1: in a file of another owner


@dataclass(frozen=True, slots=True, eq=False)
class PageRead:
    """A page to be read into an L2 frame."""

    hash: Hash
    place: Place
    position: int  # in the operation
    frame: int


# Messages to the keeper, in the order in which their senders send them.


@dataclass(frozen=True, slots=True)
class Staged:
    """A spill's own pages are in staging buffers."""

    durable: OpId
    pages: list[StagedPage]
    age: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """A write has returned; without an error it still needs a sync."""

    write: PageWrite
    error: OSError | None


@dataclass(frozen=True, slots=True)
class Synced:
    """The writes that had returned when this sync began are on the disk, unless it failed."""

    group: list[PageWrite]
    error: OSError | None


@dataclass(frozen=True, slots=True)
class BadRead:
    """A page of reload `op` could not be read, or was not what the map says. Its transfer is over."""

    op: OpId
    read: PageRead
    fault: Verdict | OSError


@dataclass(frozen=True, slots=True)
class BadHeader:
    """The check behind the start found a slot whose header is not the one that the index names."""

    hash: Hash
    place: Place
    fault: Verdict | OSError


@dataclass(frozen=True, slots=True)
class ThreadError:
    """A worker thread met something that it has no answer to."""

    what: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Close what is open: commit what is written, save the ages, then end."""

    until_s: float  # on the store's clock


Message = Staged | Wrote | Synced | BadRead | BadHeader | ThreadError | Finish | Lookup | Reload | Touch | ClearDisk
