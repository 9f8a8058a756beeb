"""L3 -> L2: requests held for pages that only the disk has.

A hold goes: queued (its turn has not come, or the copy of its attach point in L2 is not complete) -> lookup -> reading
-> landed. Or it follows another hold's reload that brings its first missing page, and then looks again. Whatever fails
ends in `done` with nothing landed: the request computes. A hold locks nothing in L1; what has landed is locked in L2
until the request is admitted, gone or past its bound.

Where nobody knows how fast the disk reads, a long reload comes in two parts: a sample of few pages, by which rank 0
measures it, then the rest or nothing (docs/decisions/0010-a-sample-before-a-long-reload.md).
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from benthic.common.layout import owner_counts
from benthic.kvcache.backup import Copies
from benthic.kvcache.commands import Agreed, Drain, Lookup, OpId, Reload, Stream, Touch
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.operations import Operation
from benthic.kvcache.state import CoreState
from benthic.kvcache.tree import Node

MOST_PAGE_US = 100_000  # … and at most this: a rate measured across a hang is none
LEAST_PAGE_US = 1_000  # a deadline allows at least this for a page, and twice the measured rate
SAMPLE_US = 100_000  # a sample may take so long, or an eighth of what computing all would take


class Phase(Enum):
    """Where a hold stands."""

    QUEUED = auto()
    LOOKUP = auto()
    READING = auto()
    FOLLOWING = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Landed:
    """Frames of one reload that wait for requests; they count against the half of L2 until the last user has gone."""

    counts: tuple[int, ...]  # by owner
    users: int = 0  # holds


@dataclass(slots=True, eq=False)
class Hold:
    """One held request. Owned by `Reloads`; the scheduler reads `done`, `landed_first` and `landed_end`."""

    seq_id: int
    hashes: list[bytes]
    limit: int  # pages that may come from the cache
    bound_us: int  # past it the request computes
    phase: Phase = Phase.QUEUED
    op: OpId = 0  # the lookup, the reload, or the reload followed
    found: int = 0  # what the lookup vouches for: up to this absolute index
    looked_up: bool = False
    sampled: bool = False  # it has had its sample, which measures the disk
    started: bool = False  # it has had its one reload, but for the sample
    wanted_copy: bool = False  # of the attach point in L2
    landed_first: int = 0  # pages [first, end) came from the disk for this request
    landed_end: int = 0
    node: Node | None = None  # the path to it is locked in L2 for this request
    landed: list[Landed] = field(default_factory=list)  # what of reloads is locked for it

    @property
    def done(self) -> bool:
        """Free for admission."""
        return self.phase is Phase.DONE


@dataclass(slots=True)
class Reloads:
    """Owns the holds and the count of frames that reloads hold; changes the shared state."""

    state: CoreState
    copies: Copies
    holds: dict[int, Hold] = field(default_factory=dict)  # by sequence id, oldest first
    reading: dict[OpId, Hold | None] = field(default_factory=dict)  # reload -> who started it, while it is there
    bringing: dict[bytes, OpId] = field(default_factory=dict)  # page hash -> reload under way
    held_frames: list[int] = field(default_factory=list)  # by owner: reading, landed and draining
    stopped: bool = False  # a flush of L3 waits for what is in flight

    def __post_init__(self) -> None:
        self.held_frames = [0] * self.state.config.num_owners

    # --- requests -----------------------------------------------------------------------------------------------------

    def hold(self, seq_id: int, hashes: list[bytes], limit: int) -> Hold | None:
        """Hold a request if the disk may have pages that the tree lacks and that are worth waiting for.

        Raises InvariantError when `seq_id` is held already.
        """
        if seq_id in self.holds:
            raise InvariantError(f"sequence {seq_id} is held already")
        s, config = self.state, self.state.config
        limit = min(limit, len(hashes))
        missing = limit - s.tree.match(hashes, limit)
        if not config.disk or self.stopped or missing < max(1, config.reload_min_pages):
            return None
        if self._slower_than_computing() or self._only_drains_left():
            return None
        hold = Hold(seq_id, hashes, limit, s.now_us + self._deadline_us(missing))
        self.holds[seq_id] = hold
        s.counters.holds += 1
        return hold

    def release(self, hold: Hold) -> None:
        """The request is admitted or gone. A reload that it started goes on, settles and is inserted like any other."""
        if self.holds.get(hold.seq_id) is hold:
            del self.holds[hold.seq_id]
            self._give_up(hold)

    def _give_up(self, hold: Hold) -> None:
        """Whatever it waits for, it waits no longer and protects nothing."""
        if hold.phase is Phase.READING and self.reading.get(hold.op) is hold:
            self.reading[hold.op] = None
        hold.phase = Phase.DONE
        self._unlock(hold)

    def _unlock(self, hold: Hold) -> None:
        if hold.node is not None:
            assert hold.node.l2 is not None
            self.state.tree.l2.unlock(hold.node.l2)
            hold.node = None
        for landed in hold.landed:
            landed.users -= 1
            if not landed.users:
                self._count_frames(landed.counts, -1)
        hold.landed = []

    @property
    def eager(self) -> bool:
        """Whether a hold goes on with the next tick."""
        return any(hold.phase in (Phase.QUEUED, Phase.DONE) for hold in self.holds.values())

    # --- every tick ---------------------------------------------------------------------------------------------------

    def overdue(self) -> tuple[OpId, ...]:
        """Lookups and reloads past their deadline: every rank reports now what it has."""
        s = self.state
        return tuple(
            op.id
            for stream in (Stream.LOOKUP, Stream.RELOAD)
            for op in s.ops.of(stream).values()
            if s.now_us > op.deadline_us
        )

    def advance(self) -> None:
        """Start what may start, and give up what is past its bound."""
        s = self.state
        for hold in list(self.holds.values()):
            if s.now_us > hold.bound_us:
                if not hold.done:
                    s.counters.reload_timeouts += 1
                self._give_up(hold)
            elif hold.phase is Phase.QUEUED:
                self._start(hold)

    def _start(self, hold: Hold) -> None:
        """From the queue to a lookup, and from there to a reload."""
        s, tree = self.state, self.state.tree
        end = tree.match(hold.hashes, hold.limit)
        missing = (hold.found if hold.looked_up else hold.limit) - end
        if missing < max(1, s.config.reload_min_pages) or hold.started or self.stopped:
            hold.phase = Phase.DONE
            return
        if self._slower_than_computing():  # a sample has told, or another's reload
            hold.phase = Phase.DONE
            return
        if (other := self.bringing.get(hold.hashes[end])) is not None:
            hold.phase, hold.op = Phase.FOLLOWING, other
            return
        if self._only_drains_left():
            hold.phase = Phase.DONE
            return
        if not hold.looked_up:
            if len(s.ops.of(Stream.LOOKUP)) < s.config.reload_max_inflight:
                self._look_up(hold, end)
            return
        attach = tree.node_ending_with(hold.hashes[end - 1], end) if end else tree.root
        if not attach.in_l2:
            self._want_attach_point(hold, attach)
        elif len(s.ops.of(Stream.RELOAD)) + len(s.ops.of(Stream.DRAIN)) < s.config.reload_max_inflight:
            self._read(hold, attach, missing)

    def _want_attach_point(self, hold: Hold, attach: Node) -> None:
        """Its backup first; the reload in the tick that settles it. No frames, no reload."""
        if attach.backup:
            return
        if hold.wanted_copy or attach.l1 is None or not self.copies.want_copy(attach):
            hold.phase = Phase.DONE
        hold.wanted_copy = True

    def _look_up(self, hold: Hold, first: int) -> None:
        s = self.state
        hashes = tuple(hold.hashes[first : hold.limit])
        op = s.ops.issue(Stream.LOOKUP, first, len(hashes), s.tree.root)
        op.hashes = hashes
        op.deadline_us = s.now_us + s.config.reload_timeout_us
        hold.phase, hold.op = Phase.LOOKUP, op.id
        s.commands.append(Lookup(op=op.id, first=first, hashes=hashes))

    def _read(self, hold: Hold, attach: Node, num_pages: int) -> None:
        """Reserve frames and read; where fewer can be had, or the disk is to be measured first, fewer pages."""
        s, tree = self.state, self.state.tree
        first, missing = attach.end, num_pages
        assert attach.l2 is not None
        tree.l2.lock(attach.l2)  # until the insert
        num_pages = min(num_pages, self._fitting(first))
        if is_sample := not hold.sampled and self._wants_sample(num_pages):
            num_pages = self._sample_pages
        frames, counts = None, owner_counts(first, num_pages, s.config.num_owners)
        if num_pages >= max(1, s.config.reload_min_pages):
            frames = s.reserve_l2(first, num_pages, counts)
        if frames is None:
            tree.l2.unlock(attach.l2)
            hold.phase = Phase.DONE
            return
        op = s.ops.issue(Stream.RELOAD, first, num_pages, attach)
        op.frames, op.hashes = frames, tuple(hold.hashes[first : first + num_pages])
        op.deadline_us = s.now_us + (self._sample_us(missing) if is_sample else self._deadline_us(num_pages))
        self._count_frames(counts, 1)
        self.reading[op.id] = hold
        self.bringing |= dict.fromkeys(op.hashes, op.id)
        hold.phase, hold.op = Phase.READING, op.id
        hold.sampled, hold.started = hold.sampled or is_sample, not is_sample
        s.commands.append(Reload(op=op.id, first=first, frames=frames, hashes=op.hashes))

    # --- settling -----------------------------------------------------------------------------------------------------

    def settle_lookup(self, op: Operation, agreed: Agreed) -> None:
        """The disk vouches for this many pages on every rank."""
        for hold in self.holds.values():
            if hold.phase is Phase.LOOKUP and hold.op == op.id:
                hold.found = op.first + min(agreed.value - 1, op.num_pages)
                hold.looked_up = True
                hold.phase = Phase.QUEUED

    def settle_reload(self, op: Operation, agreed: Agreed, *, overdue: bool) -> list[Node]:
        """Insert exactly the pages that every rank has verified, the rest is a miss; gives the nodes new in L2."""
        s = self.state
        count = min(agreed.value - 1, op.num_pages)
        starter = self.reading.pop(op.id)
        for page_hash in op.hashes:
            self.bringing.pop(page_hash, None)
        self._count_frames(owner_counts(op.first, op.num_pages, s.config.num_owners), -1)
        s.counters.reloads += 1
        s.counters.reload_timeouts += overdue and count < op.num_pages
        if count < op.num_pages:
            self._let_go(op, count, quarantine=overdue)
        new, end = self._insert(op, count)
        landed = Landed(owner_counts(op.first, end - op.first, s.config.num_owners))
        for hold in self.holds.values():
            if hold.op == op.id and hold.phase in (Phase.FOLLOWING, Phase.READING):
                self._land(hold, op, end, landed)
                ends = hold is starter and (hold.started or self._sample_failed(op, count, overdue))
                hold.phase = Phase.DONE if ends else Phase.QUEUED  # who followed looks for what is left
        if landed.users:
            self._count_frames(landed.counts, 1)
        assert op.bottom.l2 is not None
        s.tree.l2.unlock(op.bottom.l2)
        return new

    def _land(self, hold: Hold, op: Operation, end: int, landed: Landed) -> None:
        """Lock for the waiter what it can use of the pages that came, which are there up to `end`."""
        tree = self.state.tree
        common = op.first
        while common < min(end, hold.limit) and hold.hashes[common] == op.hashes[common - op.first]:
            common += 1
        if common == op.first:
            return
        node = tree.node_ending_with(hold.hashes[common - 1], common)
        assert node.l2 is not None
        tree.l2.lock(node.l2)
        if hold.node is not None:  # what came before lies above
            assert hold.node.l2 is not None
            tree.l2.unlock(hold.node.l2)
        else:
            hold.landed_first = op.first
        hold.node, hold.landed_end = node, common
        hold.landed.append(landed)
        landed.users += 1

    def _insert(self, op: Operation, count: int) -> tuple[list[Node], int]:
        """Hang the first `count` pages below the attach point, as far as L2 is complete above them.

        Gives the nodes that are new in L2, and the absolute index up to which the pages are there.
        """
        s, tree = self.state, self.state.tree
        new: list[Node] = []
        node, index, end = op.bottom, op.first, op.first + count
        known = op.first + tree.match(op.hashes, count)  # what the tree has gained meanwhile
        while index < end:
            at = index - op.first
            if index == known:
                new += tree.insert(node, op.hashes[at:count], s.tick, l2_frames=op.frames[at:count])
                index = end
                break
            child = tree.find(op.hashes[at])
            assert child is not None
            if known < child.end:
                child = tree.split(child, known - child.first)
            frames = op.frames[at : at + len(child.hashes)]
            if child.l2 is None:
                tree.l2_attach(child, frames, s.tick)
                s.commands.append(Touch(first=index, hashes=child.hashes, age=child.age))
                new.append(child)
            elif child.backup:  # not complete, and what is below it must not be before it
                s.l2.release(index, op.frames[at:count])
                break
            else:
                s.l2.release(index, frames)
            node, index = child, child.end
        for node in new:
            node.durable = node.durable or s.config.reload_marks
            s.counters.reloaded += len(node.hashes)
        return new, index

    def _let_go(self, op: Operation, count: int, *, quarantine: bool) -> None:
        """Frames past the agreed count: free, or out of use until no rank's I/O touches them."""
        s = self.state
        first, frames = op.first + count, op.frames[count:]
        if not quarantine:
            s.l2.release(first, frames)
            return
        drain = s.ops.issue(Stream.DRAIN, first, len(frames), s.tree.root)
        drain.frames, drain.partner = frames, op.id
        self._count_frames(owner_counts(first, len(frames), s.config.num_owners), 1)
        s.commands.append(Drain(op=drain.id, reload=op.id))

    def settle_drain(self, op: Operation) -> None:
        """No I/O touches the quarantined frames any more."""
        self._count_frames(owner_counts(op.first, op.num_pages, self.state.config.num_owners), -1)
        self.state.l2.release(op.first, op.frames)

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _only_drains_left(self) -> bool:
        """Drains alone fill the bound: a disk that hangs; waiting for it would be in vain."""
        return len(self.state.ops.of(Stream.DRAIN)) >= self.state.config.reload_max_inflight

    def _fitting(self, first: int) -> int:
        """Pages from `first` on for which L2 has room, with reloads holding at most half of each lane."""
        s = self.state
        owners, half = s.config.num_owners, s.config.l2_frames // 2
        lanes = zip(self.held_frames, s.l2.free(), s.tree.l2.evictable, strict=True)
        room = [max(0, min(half - held, free + evictable)) for held, free, evictable in lanes]
        # an owner's pages are every `owners`th: the first of them without room is this far from `first`
        return min((owner - first) % owners + left * owners for owner, left in enumerate(room))

    def _deadline_us(self, num_pages: int) -> int:
        s = self.state
        return s.config.reload_timeout_us + num_pages * min(MOST_PAGE_US, max(LEAST_PAGE_US, 2 * s.read_us_per_page))

    def _slower_than_computing(self) -> bool:
        """As far as both rates are known. Reading must be faster by an eighth: a copy to L1 comes on top of it."""
        s = self.state
        return 0 < 7 * s.compute_us_per_page < 8 * s.read_us_per_page

    # --- the sample ---------------------------------------------------------------------------------------------------

    @property
    def _sample_pages(self) -> int:
        config = self.state.config
        return max(config.reload_min_pages, config.reload_sample_pages * config.num_owners)

    def _wants_sample(self, num_pages: int) -> bool:
        """Whether reading is to be weighed against computing, and nobody knows how fast it is; a short reload tells."""
        s = self.state
        return bool(s.compute_us_per_page) and not s.read_us_per_page and num_pages >= 2 * self._sample_pages

    def _sample_us(self, missing: int) -> int:
        """How long a sample may take, of a suffix of `missing` pages: a disk that hangs shows early here."""
        most = max(SAMPLE_US, missing * self.state.compute_us_per_page // 8)
        return min(most, self._deadline_us(self._sample_pages))

    def _sample_failed(self, op: Operation, count: int, overdue: bool) -> bool:
        """A sample with a bad page, or too slow; whole in the last moment it may have no rate yet, and is too slow."""
        return count < op.num_pages or (overdue and not self.state.read_us_per_page)

    def _count_frames(self, counts: tuple[int, ...], sign: int) -> None:
        self.held_frames = [held + sign * count for held, count in zip(self.held_frames, counts, strict=True)]
