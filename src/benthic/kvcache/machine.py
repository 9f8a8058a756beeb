"""The cache core: a replicated, deterministic state machine over the radix tree, the owner lanes and what is in flight.

Every rank runs one and feeds it the same calls; equal calls give equal cores, in different processes too: no clock, no
random numbers, no iteration over sets, no order by `hash()` or `id()`, no floats. What it answers are page indexes,
counts and commands; it touches no memory, file or device.

A page of L1 is free, private (one running sequence may write it) or cached (of the tree, never written again). A frame
of L2 is free, of a node (which it fills or is being filled for), or of an operation.

A tick: `begin_tick` settles what all ranks agree on; then calls for sequences; `end_tick` issues what is left to issue;
`take_commands` at any time gives what the tier workers must do, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benthic.common.layout import owner_counts
from benthic.kvcache.backup import Copies
from benthic.kvcache.checks import check_core
from benthic.kvcache.commands import Agreed, Command, OpId, Stream, Touch
from benthic.kvcache.digest import digest_core
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.flush import DiskFlushes, Flushed
from benthic.kvcache.lanes import Lanes
from benthic.kvcache.operations import Operation
from benthic.kvcache.planner import plan_eviction
from benthic.kvcache.reload import Hold, Reloads
from benthic.kvcache.spill import Spills
from benthic.kvcache.state import WRITE_BACK, CoreConfig, CoreState, Counters
from benthic.kvcache.tree import Node, RadixTree


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
    age: int  # number of the admission; its pages are as old on disk
    load_backs: list[OpId] = field(default_factory=list)  # that fill some of its pages; those settled are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCounts:
    """One lane of a tier in pages or frames: total = free + cached + private; `locked` is what is in use of `cached`.

    `private`: in L1 of running sequences; in L2 of operations (being read, landed or drained).
    """

    total: int
    free: int
    cached: int
    private: int
    locked: int


@dataclass(frozen=True, slots=True)
class Found:
    """What of a sequence is cached: pages [0, in_l1) in L1, then pages [in_l1, end) in L2 alone."""

    in_l1: int
    end: int


class CacheCore:
    """Owns everything replicated about the cache. Every change of it is a method of this class."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        owners = config.num_owners
        self.state = CoreState(
            config=config,
            tree=RadixTree(owners, owners * config.l1_pages, owners * config.l2_frames),
            l1=Lanes(owners, config.l1_pages),
            l2=Lanes(owners, config.l2_frames),
        )
        self.copies = Copies(self.state)
        self.spills = Spills(self.state)
        self.reloads = Reloads(self.state, self.copies)
        self.flushes = DiskFlushes(self.state, self.spills, self.reloads)
        self._tree = self.state.tree
        self._tree.on_split = self.spills.split
        self._tree.on_l2_remove = self.spills.forget
        self._l1 = self.state.l1
        self._runs: dict[int, PageRun] = {}
        low = config.l1_free_pages
        self._refill_to = min(config.l1_pages, low + max(low // 2, config.l1_pages // 64)) if low else 0

    @property
    def num_nodes(self) -> int:
        return len(self._tree.nodes)

    @property
    def counters(self) -> Counters:
        """Totals since the start; not to be changed."""
        return self.state.counters

    @property
    def runs(self) -> list[PageRun]:
        """The running sequences, by id of their opening; for checks and digests."""
        return list(self._runs.values())

    # --- the tick -----------------------------------------------------------------------------------------------------

    def windows(self) -> tuple[tuple[OpId, ...], ...]:
        """The operations in flight, by stream and in order: what the agreement is about."""
        return self.state.ops.windows()

    @property
    def in_flight(self) -> int:
        """How many operations are in flight."""
        return len(self.state.ops.ops)

    @property
    def busy(self) -> bool:
        """Whether ticks must go on although no sequence runs: something is in flight, listed or held."""
        return bool(self.state.ops.ops or self.spills.working or self.reloads.holds or self.flushes.waiting)

    @property
    def writing_down(self) -> bool:
        """Whether pages are on their way to L2 or to disk."""
        down = (Stream.BACKUP, Stream.GATHER, Stream.DURABLE)
        return self.spills.working or any(self.state.in_stream(stream) for stream in down)

    @property
    def copying(self) -> bool:
        """Whether copies are in flight, which keep pages of L1 from being evicted until they settle."""
        return self.state.in_stream(Stream.BACKUP) or self.state.in_stream(Stream.LOADBACK)

    @property
    def loading_back(self) -> bool:
        """Whether load-backs are in flight."""
        return self.state.in_stream(Stream.LOADBACK)

    @property
    def patient(self) -> bool:
        """Whether only durable and drain operations are waited for: ticks need not come faster than every 5 ms."""
        s = self.state
        quick = (Stream.BACKUP, Stream.LOADBACK, Stream.GATHER, Stream.LOOKUP, Stream.RELOAD)
        return not (any(s.in_stream(stream) for stream in quick) or self.reloads.eager)

    def overdue(self, now_us: int) -> tuple[OpId, ...]:
        """Operations that settle in the tick at `now_us` whatever is finished: every rank reports what it has."""
        self.state.now_us = max(self.state.now_us, now_us)
        return self.reloads.overdue()

    def begin_tick(
        self,
        tick: int,
        now_us: int = 0,
        agreed: Sequence[Agreed] = (),
        *,
        read_us_per_page: int = 0,
        compute_us_per_page: int = 0,
    ) -> None:
        """Set the logical clock (accesses are dated by it) and the tick clock, and settle what all ranks agree on.

        Raises ValueError when the tick goes back, InvariantError for an operation that is not in flight.
        """
        s = self.state
        if tick < s.tick:
            raise ValueError(f"the tick goes back from {s.tick} to {tick}")
        s.tick = tick
        s.now_us = max(s.now_us, now_us)
        s.read_us_per_page, s.compute_us_per_page = read_us_per_page, compute_us_per_page
        overdue = self.reloads.overdue() if agreed else ()
        for end in agreed:
            op = s.ops.ops.get(end.op)
            if op is None:
                raise InvariantError(f"operation {end.op} is agreed to be over and is not in flight")
            s.ops.remove(op)
            self._settle(op, end, op.id in overdue)
        if agreed:
            self._forget_load_backs()
        if self.config.disk:
            self.flushes.advance()
            self.reloads.advance()

    def _settle(self, op: Operation, agreed: Agreed, overdue: bool) -> None:
        match op.stream:
            case Stream.BACKUP:
                self._backed_up(self.copies.settle_backup(op, agreed))
            case Stream.LOADBACK:
                self.copies.settle_load_back(op, agreed)
            case Stream.GATHER:
                self.spills.settle_gather(op)
            case Stream.DURABLE:
                self.spills.settle_durable(op, agreed)
            case Stream.LOOKUP:
                self.reloads.settle_lookup(op, agreed)
            case Stream.RELOAD:
                for node in self.reloads.settle_reload(op, agreed, overdue=overdue):
                    self.spills.list(node)
            case Stream.DRAIN:
                self._drained(op)

    def _backed_up(self, nodes: list[Node]) -> None:
        """Nodes have a copy in L2 from now on: their turn for the disk, and their time to leave L1, may have come."""
        for node in nodes:
            self.spills.list(node)
        if nodes:
            self.copies.drop_leaving(nodes[-1])

    def _drained(self, op: Operation) -> None:
        if not self.flushes.settled(op):
            self.reloads.settle_drain(op)

    def _forget_load_backs(self) -> None:
        filling = self.state.ops.of(Stream.LOADBACK)
        for run in self._runs.values():
            if run.load_backs:
                run.load_backs = [op for op in run.load_backs if op in filling]

    def end_tick(self) -> None:
        """Background eviction to the watermark, then gathers for what is listed."""
        self.evict_to_watermark()
        if self.config.disk:
            self.spills.issue()

    def take_commands(self) -> list[Command]:
        """What the workers must do, in order; each command is given once."""
        commands = self.state.commands
        if commands:
            self.state.commands = []
        return commands

    # --- sequences ----------------------------------------------------------------------------------------------------

    def probe(self, hashes: Sequence[bytes], limit_pages: int) -> Found:
        """How many leading pages of `hashes`, at most `limit_pages`, are cached, and where. Changes nothing."""
        return Found(*self._tree.match_tiers(hashes, limit_pages))

    def hold(self, seq_id: int, hashes: list[bytes], limit_pages: int) -> Hold | None:
        """Hold a sequence for pages that the disk may have; None: not worth waiting. End it with `release`."""
        return self.reloads.hold(seq_id, hashes, limit_pages)

    def release(self, hold: Hold) -> None:
        """The held sequence is admitted (after its `open`) or gone."""
        self.reloads.release(hold)

    def open(self, seq_id: int, hashes: Sequence[bytes], limit_pages: int) -> PageRun:
        """Start a run with the leading pages that L1 and L2 hold, at most `limit_pages`, and lock them.

        What is in L2 alone gets L1 pages and a load-back, unless L1 lacks the room. Counts as a hit of the nodes used.
        Raises InvariantError when `seq_id` is open already.
        """
        if seq_id in self._runs:
            raise InvariantError(f"sequence {seq_id} is open already")
        s, root = self.state, self._tree.root
        s.admissions += 1
        run = self._runs[seq_id] = PageRun(seq_id, root, 0, [], s.admissions)
        s.tree.l1.lock(s.tree.l1.root)  # a run uses the node that its cached pages end with
        found = self.probe(hashes, limit_pages)
        self._take_cached(run, hashes, found.in_l1)
        if found.end > run.num_cached:
            self._load_back(run, hashes, found.end)
        if run.num_cached:
            self._hit(run, hashes, 0)
        return run

    def _hit(self, run: PageRun, hashes: Sequence[bytes], start: int) -> None:
        """A run has taken pages `start …` from the cache: what lacks a copy below gets its chance, all are young."""
        self.copies.hit(run.node)
        self.spills.hit(run.node)
        self._touch(run, hashes[start : run.num_cached], start)

    def _touch(self, run: PageRun, hashes: Sequence[bytes], start: int) -> None:
        """No page that a run uses may be older than the run's own below it: on disk the oldest go first."""
        if not self.config.disk:
            return
        young = True
        for node in self._tree.path(run.node, self._tree.root):
            if node.end <= start:
                break
            if node.age < run.age:
                node.age, young = run.age, False
        if not young:
            self.state.commands.append(Touch(first=start, hashes=tuple(hashes), age=run.age))

    def adopt(self, run: PageRun, hashes: Sequence[bytes], limit_pages: int) -> int:
        """Take what has come into L1 behind the run's cached pages since; gives how many pages.

        `hashes` and `limit_pages` count from the sequence's first page, as for `open`. Raises InvariantError while the
        run has private pages.
        """
        self._demand_open(run)
        if len(run.pages) != run.num_cached:
            raise InvariantError(f"sequence {run.seq_id} adopts pages while it has {_num_private(run)} private ones")
        start = run.num_cached
        taken = self._take_cached(run, hashes, self._tree.l1_match(hashes, limit_pages, start))
        if taken:
            self._hit(run, hashes, start)
        return taken

    def _take_cached(self, run: PageRun, hashes: Sequence[bytes], end: int) -> int:
        start = run.num_cached
        if end <= start:
            return 0
        node = self._tree.node_ending_with(hashes[end - 1], end)
        self._go_down(run, node, is_hit=True)
        return end - start

    def _go_down(self, run: PageRun, node: Node, *, is_hit: bool) -> list[int]:
        """The run's path goes on to `node`, whose L1 pages it takes."""
        pages, filling = self._tree.l1_lock_path(node, run.node, self.state.tick, is_hit=is_hit)
        run.pages[run.num_cached : run.num_cached + len(pages)] = pages
        run.node, run.num_cached = node, node.end
        run.load_backs += [op for op in filling if op not in run.load_backs]
        return pages

    def _load_back(self, run: PageRun, hashes: Sequence[bytes], end: int) -> None:
        """Pages [num_cached, end), which are in L2 alone, get L1 pages for the run."""
        tree, first = self._tree, run.num_cached
        bottom = tree.node_ending_with(hashes[end - 1], end)
        assert bottom.l2 is not None
        tree.l2.lock(bottom.l2)  # nothing on the way may go while room is made
        pages = self._reserve_l1(first, end - first)
        tree.l2.unlock(bottom.l2)
        if pages is None:
            return
        self.copies.load_back(bottom, first, tuple(pages))
        self._go_down(run, bottom, is_hit=True)

    def has_room(self, run: PageRun, num_pages: int, keep_free: int) -> bool:
        """Whether `allocate(run, num_pages)` would leave `keep_free` pages free or evictable in every lane."""
        need = owner_counts(len(run.pages), num_pages, self.config.num_owners)
        room = zip(self._l1.free(), self._tree.l1.evictable, need, strict=True)
        return all(free + evictable - pages >= keep_free for free, evictable, pages in room)

    def has_room_to_open(self, hashes: Sequence[bytes], in_l1: int, num_pages: int, keep_free: int) -> bool:
        """Whether `open`, then `has_room(run, …, keep_free)`, would hold, with `num_pages` needed behind L1's part.

        `num_pages` includes those to be loaded back. Changes nothing: a request that has to wait is no hit, however
        often it is looked at. `in_l1` is `probe`'s.
        """
        locked = self._tree.l1_unlocked(hashes[in_l1 - 1], in_l1) if in_l1 else [0] * self.config.num_owners
        need = owner_counts(in_l1, num_pages, self.config.num_owners)
        room = zip(self._l1.free(), self._tree.l1.evictable, locked, need, strict=True)
        return all(free + evictable - path - pages >= keep_free for free, evictable, path, pages in room)

    def allocate(self, run: PageRun, num_pages: int) -> bool:
        """Append private pages to the run, evicting what the planner picks for exactly what is short.

        Gives False, with nothing changed at all, when a lane would not have enough even so.
        """
        self._demand_open(run)
        pages = self._reserve_l1(len(run.pages), num_pages)
        if pages is None:
            return False
        run.pages += pages
        return True

    def _reserve_l1(self, start: int, num_pages: int) -> list[int] | None:
        need = owner_counts(start, num_pages, self.config.num_owners)
        short = [max(0, pages - free) for pages, free in zip(need, self._l1.free(), strict=True)]
        if any(short):
            if any(lack > evictable for lack, evictable in zip(short, self._tree.l1.evictable, strict=True)):
                return None
            self.state.evict_l1(short)
        return self._l1.reserve(start, num_pages)

    def commit(self, run: PageRun, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Give the run's next private pages, whose writes are launched, to the tree under these hashes.

        A page that L1 has already is a duplicate: the run takes the tree's page and frees its own. Gives those, as
        (page index in the sequence, its page from now on). Where only L2 has it, the own page becomes its L1 copy.
        Raises InvariantError for more hashes than private pages.
        """
        self._demand_open(run)
        if len(hashes) > _num_private(run):
            raise InvariantError(f"sequence {run.seq_id}: {len(hashes)} pages committed, {_num_private(run)} private")
        tree, start = self._tree, run.num_cached
        end = start + len(hashes)
        known = start + tree.match(hashes, len(hashes))  # what follows is in no tier
        replaced: list[tuple[int, int]] = []
        while run.num_cached < end:
            at = run.num_cached
            if at == known:
                self._insert(run, tuple(hashes[at - start :]), end)
                break
            node = tree.find(hashes[at - start])
            assert node is not None
            if known < node.end:
                node = tree.node_ending_with(hashes[known - start - 1], known)
            if node.l1 is None:
                tree.l1_attach(node, tuple(run.pages[at : node.end]), self.state.tick)
                self._go_down(run, node, is_hit=False)
            else:
                self._l1.release(at, run.pages[at : node.end])
                replaced += enumerate(self._go_down(run, node, is_hit=False), at)
            self._touch(run, hashes[at - start : node.end - start], at)
        return replaced

    def _insert(self, run: PageRun, hashes: tuple[bytes, ...], end: int) -> None:
        nodes = self._tree.insert(
            run.node, hashes, self.state.tick, l1_pages=tuple(run.pages[run.num_cached : end]), locks=1
        )
        for node in nodes:
            node.age = run.age
        run.node, run.num_cached = nodes[-1], end
        self.copies.entered(nodes)

    def close(self, run: PageRun) -> None:
        """End a run: its cached pages stay in the tree without its lock, its private ones are freed."""
        self._demand_open(run)
        del self._runs[run.seq_id]
        self._tree.l1_unlock_path(run.node, self.state.tick)
        self._l1.release(run.num_cached, run.pages[run.num_cached :])
        run.node, run.num_cached, run.pages, run.load_backs = self._tree.root, 0, [], []

    def _demand_open(self, run: PageRun) -> None:
        if self._runs.get(run.seq_id) is not run:
            raise InvariantError(f"sequence {run.seq_id} is not open in this core")

    # --- eviction -----------------------------------------------------------------------------------------------------

    def evict_to_watermark(self) -> None:
        """Background eviction: refill the lanes when one has fewer free pages than the watermark.

        Refills beyond the watermark, so that the next ticks find room without a plan
        (docs/decisions/0002-eviction-hysteresis.md). Under write-back victims get their copy first.
        """
        free = self._l1.free()
        if min(free) >= self.config.l1_free_pages:
            return
        writes_back = self.config.policy == WRITE_BACK and self.config.l2_frames > 0
        if writes_back:
            free = [pages + leaving for pages, leaving in zip(free, self.copies.leaving_pages(), strict=True)]
            if min(free) >= self.config.l1_free_pages:
                return
        lacks = (max(0, self._refill_to - pages) for pages in free)
        deficits = [min(lack, evictable) for lack, evictable in zip(lacks, self._tree.l1.evictable, strict=True)]
        if not any(deficits):
            return
        if writes_back:
            plan = plan_eviction(list(self._tree.l1.leaves.values()), deficits)
            self.copies.let_go([self._tree.nodes[victim] for victim in plan.victims])
        else:
            self.state.evict_l1(deficits)

    def flush(self, tiers: Sequence[str] = ("l1", "l2")) -> Flushed:
        """Drop every copy in L1 and L2, where named, that no lock, operation or copy below needs; leaves first."""
        return self.flushes.flush(tiers)

    def flush_disk(self, token: int) -> None:
        """Empty the disk as soon as what is in flight there has settled; `flushes.take_done` tells when it is over."""
        self.flushes.ask(token)

    # --- state --------------------------------------------------------------------------------------------------------

    def lanes(self) -> list[LaneCounts]:
        """The page counts of each L1 lane, in the order of owners."""
        tier = self._tree.l1
        return _lane_counts(self.config.l1_pages, self._l1.free(), tier.cached, tier.evictable)

    def l2_lanes(self) -> list[LaneCounts]:
        """The frame counts of each L2 lane, in the order of owners; empty without a host tier."""
        if not self.config.l2_frames:
            return []
        tier = self._tree.l2
        return _lane_counts(self.config.l2_frames, self.state.l2.free(), tier.cached, tier.evictable)

    def digest(self) -> bytes:
        """SHA-256 of all that decisions depend on: equal on all ranks, or the ranks have parted."""
        return digest_core(self)

    def check(self) -> None:
        """Every invariant, from scratch; for tests. Raises InvariantError."""
        check_core(self)


def _lane_counts(total: int, free: list[int], cached: list[int], evictable: list[int]) -> list[LaneCounts]:
    return [
        LaneCounts(total=total, free=f, cached=c, private=total - f - c, locked=c - e)
        for f, c, e in zip(free, cached, evictable, strict=True)
    ]


def _num_private(run: PageRun) -> int:
    return len(run.pages) - run.num_cached
