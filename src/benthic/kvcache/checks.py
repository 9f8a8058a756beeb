"""Every invariant of a core, counted anew from scratch; for tests and for state queries after a doubt."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from benthic.common.layout import owner_counts
from benthic.kvcache.commands import Stream
from benthic.kvcache.lanes import Lanes
from benthic.kvcache.tree import Node, demand

if TYPE_CHECKING:
    from benthic.kvcache.machine import CacheCore

LOCKS_L1 = (Stream.BACKUP, Stream.LOADBACK)
LOCKS_L2 = (Stream.BACKUP, Stream.LOADBACK, Stream.GATHER, Stream.RELOAD)


def check_core(core: "CacheCore") -> None:
    """Raises InvariantError naming the first invariant that fails."""
    s = core.state
    s.tree.check()
    s.l1.check()
    s.l2.check()
    _check_memory(core)
    _check_runs(core)
    _check_locks(core)
    _check_marks(core)


def _check_memory(core: "CacheCore") -> None:
    """Every page and frame has exactly one owner: the free list, a node, a run or an operation."""
    s, n = core.state, core.config.num_owners
    nodes = s.tree.nodes.values()
    private = ((run.num_cached, run.pages[run.num_cached :]) for run in core.runs)
    _one_owner(s.l1, core.config.l1_pages, n, chain(((x.first, x.l1.pages) for x in nodes if x.l1), private))
    ops = ((op.first, op.frames) for op in s.ops.ops.values())
    _one_owner(s.l2, core.config.l2_frames, n, chain(((x.first, x.l2.pages) for x in nodes if x.l2), ops))


def _one_owner(lanes: Lanes, per_lane: int, num_owners: int, held: Iterable[tuple[int, Sequence[int]]]) -> None:
    found = [bytearray(per_lane) for _ in range(num_owners)]
    for first, pages in held:
        for offset, page in enumerate(pages):
            owner = (first + offset) % num_owners
            demand(
                not found[owner][page] and lanes[owner].is_live(page),
                f"lane {owner}: page {page} is held twice, or held while it is free",
            )
            found[owner][page] = 1
    for owner in range(num_owners):
        demand(sum(found[owner]) + lanes[owner].num_free == per_lane, f"lane {owner}: a page has leaked")


def _check_runs(core: "CacheCore") -> None:
    tree, filling = core.state.tree, core.state.ops.of(Stream.LOADBACK)
    for run in core.runs:
        pages: tuple[int, ...] = ()
        for node in tree.path(run.node, tree.root):
            assert node.l1 is not None
            pages = node.l1.pages + pages
            demand(not node.load_back or node.load_back in run.load_backs, f"sequence {run.seq_id} would not wait")
        demand(
            run.node.end == run.num_cached and list(pages) == run.pages[: run.num_cached],
            f"sequence {run.seq_id}: its cached pages are not those of its path",
        )
        demand(all(op in filling for op in run.load_backs), f"sequence {run.seq_id} waits for what is settled")


def _check_locks(core: "CacheCore") -> None:
    """Uses are exactly: runs and copies in L1; copies, gathers, reloads and holds in L2."""
    s = core.state
    l1: dict[int, int] = {}
    l2: dict[int, int] = {}

    def count(into: dict[int, int], bottom: Node) -> None:
        into[bottom.id] = into.get(bottom.id, 0) + 1

    for run in core.runs:
        count(l1, run.node)
    for op in s.ops.ops.values():
        if op.stream in LOCKS_L1:
            count(l1, op.bottom)
        if op.stream in LOCKS_L2 and not op.rolled_back:
            count(l2, op.bottom)
    for node in [hold.node for hold in core.reloads.holds.values() if hold.node is not None]:
        count(l2, node)
    for name, tier, uses in (("L1", s.tree.l1, l1), ("L2", s.tree.l2, l2)):
        uses[0] = uses.get(0, 0) + 1  # the root stays locked
        held = {0: tier.root} | {n.id: h for n in s.tree.nodes.values() if (h := n.l1 if name == "L1" else n.l2)}
        for node_id, h in held.items():
            want = uses.pop(node_id, 0) + sum(child.locks > 0 for child in h.children.values())
            demand(h.locks == want, f"node {node_id}: {h.locks} locks in {name}, {want} uses and children in use")
        demand(not uses, f"nodes {list(uses)} are used in {name}, which does not hold them")


def _check_marks(core: "CacheCore") -> None:
    s, config = core.state, core.config
    for node in s.tree.nodes.values():
        for op_id, stream in ((node.backup, Stream.BACKUP), (node.load_back, Stream.LOADBACK)):
            demand(not op_id or op_id in s.ops.of(stream), f"node {node.id}: operation {op_id} is not in flight")
        demand(not node.spill or node.spill in s.ops.of(Stream.DURABLE), f"node {node.id}: its spill is over")
    for node_id, node in core.spills.listed.items():
        demand(s.tree.nodes.get(node_id) is node and node.in_l2, f"node {node_id} is listed and not in L2")
    brought = {h: op.id for op in s.ops.of(Stream.RELOAD).values() for h in op.hashes}
    demand(brought == core.reloads.bringing, "pages that reloads bring")
    staged = [0] * config.num_owners
    for op in s.ops.of(Stream.DURABLE).values():
        counts = owner_counts(op.first, op.num_pages, config.num_owners)
        staged = [a + b for a, b in zip(staged, counts, strict=True)]
    free = core.spills.staging_free
    demand([f + u for f, u in zip(free, staged, strict=True)] == [config.staging_frames] * config.num_owners, "staging")
    held = [0] * config.num_owners
    counted = [owner_counts(op.first, op.num_pages, config.num_owners) for op in s.ops.of(Stream.RELOAD).values()]
    counted += [owner_counts(op.first, op.num_pages, config.num_owners) for op in s.ops.of(Stream.DRAIN).values()]
    landings = [landed for hold in core.reloads.holds.values() for landed in hold.landed]
    counted += [landed.counts for landed in {id(landed): landed for landed in landings}.values()]
    demand(all(landed.users == landings.count(landed) for landed in landings), "users of what has landed")
    for counts in counted:
        held = [a + b for a, b in zip(held, counts, strict=True)]
    demand(held == core.reloads.held_frames, f"reloads hold {held} frames, {core.reloads.held_frames} are counted")
