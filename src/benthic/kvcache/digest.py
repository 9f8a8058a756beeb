"""The digest of a core: one SHA-256 over all that its decisions depend on, the same in every process.

Fed in a fixed order: clock and counter; nodes by id; the protected segment from least to most recent; each lane's free
list; runs by sequence id. Numbers are written as text with separators, so that no two states have the same bytes.
"""

from collections.abc import Iterable
from hashlib import sha256

from benthic.kvcache.lanes import Lanes
from benthic.kvcache.tree import RadixTree

RunState = tuple[int, int, int, list[int]]  # sequence id, deepest node, cached pages, L1 pages


def digest_core(tick: int, evicted_pages: int, tree: RadixTree, l1: Lanes, runs: Iterable[RunState]) -> bytes:
    """SHA-256 of the state. O(everything): for debugging and for state queries, not for every tick."""
    digest = sha256(f"{tick} {evicted_pages} {len(tree.nodes)}\n".encode())
    for node in tree.nodes.values():
        h = node.l1
        parent = node.parent.id if node.parent else -1
        marks = (node.id, parent, node.first, node.hits, h.locks, h.segment, h.last_access, h.pages)
        digest.update(f"{marks}\n".encode())
        digest.update(b"".join(node.hashes))
    digest.update(f"{list(tree.l1_protected)}\n".encode())
    for owner in range(l1.num_owners):
        digest.update(f"{l1[owner].free_list()}\n".encode())
    digest.update(f"{sorted(runs)}\n".encode())
    return digest.digest()
