"""The digest of a core: one SHA-256 over all that its decisions depend on, the same in every process.

Fed in a fixed order: clocks and counters; nodes by id; recency; each lane's free list; operations by id; the spill
list, the pause and the staging buffers; holds; runs by sequence id. Numbers are written as text with separators, so
that no two states have the same bytes.
"""

from collections.abc import Iterator
from dataclasses import astuple
from hashlib import sha256
from typing import TYPE_CHECKING

from benthic.kvcache.planner import Holding

if TYPE_CHECKING:
    from benthic.kvcache.machine import CacheCore


def digest_core(core: "CacheCore") -> bytes:
    """SHA-256 of the state. O(everything): for debugging and for state queries, not for every tick."""
    digest = sha256()
    for part in _parts(core):
        digest.update(part)
        digest.update(b"\n")
    return digest.digest()


def _parts(core: "CacheCore") -> Iterator[bytes]:
    s = core.state
    yield f"{s.tick} {s.now_us} {s.read_us_per_page} {s.compute_us_per_page} {s.admissions}".encode()
    yield f"{astuple(s.counters)} {len(s.tree.nodes)} {len(s.commands)}".encode()
    for node in s.tree.nodes.values():
        parent = node.parent.id if node.parent else -1
        marks = (node.backup, node.load_back, node.spill, node.durable, node.leaving, node.age)
        yield f"{node.id} {parent} {node.first} {node.hits} {marks} {_held(node.l1)} {_held(node.l2)}".encode()
        yield b"".join(node.hashes)
    for tier, lanes in ((s.tree.l1, s.l1), (s.tree.l2, s.l2)):
        yield f"{list(tier.protected)} {list(tier.leaves)}".encode()
        for owner in range(lanes.num_owners):
            yield f"{lanes[owner].free_list()}".encode()
    yield f"next {s.ops.next_id} {s.tree.next_id}".encode()
    for op in s.ops.ops.values():
        head = (op.id, int(op.stream), op.first, op.num_pages, op.bottom.id, op.frames, op.deadline_us)
        yield f"{head} {op.rolled_back} {op.partner}".encode()
        yield b"".join(op.hashes)
    spills, reloads, flushes = core.spills, core.reloads, core.flushes
    yield f"{list(spills.listed)} {spills.staging_free} {spills.stopped}".encode()
    yield f"{spills.failures} {spills.pause_us} {spills.paused_until_us} {spills.trial}".encode()
    yield f"{flushes.pending} {flushes.asked} {flushes.clearing} {flushes.done}".encode()
    yield f"{reloads.held_frames} {reloads.stopped}".encode()
    yield f"{[(op, hold and hold.seq_id) for op, hold in reloads.reading.items()]}".encode()
    for hold in reloads.holds.values():
        where = (hold.seq_id, hold.limit, hold.bound_us, hold.phase.name, hold.op, hold.found)
        past = (hold.looked_up, hold.sampled, hold.started, hold.wanted_copy, [landed.counts for landed in hold.landed])
        yield f"{where} {past} {hold.landed_first} {hold.landed_end} {hold.node and hold.node.id}".encode()
    for run in sorted(core.runs, key=lambda run: run.seq_id):
        yield f"{run.seq_id} {run.node.id} {run.num_cached} {run.pages} {run.age} {run.load_backs}".encode()


def _held(h: Holding | None) -> tuple[object, ...]:
    return () if h is None else (h.locks, h.segment, h.last_access, h.pages)
