"""What the tiers below L1 report for metrics and `/cache`.

Counters are totals since start, gauges are of the moment.
"""

import msgspec


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of the disk floor."""

    rank: int
    path: str  # of the slab
    direct: bool  # O_DIRECT; False: buffered with fdatasync
    slots_total: int
    slots_used: int  # live and being written
    slots_retired: int  # after an I/O error, never used again
    slot_bytes: int
    staging_total: int  # buffers
    staging_used: int
    write_queue: int
    read_queue: int
    spilled_pages: int
    spilled_bytes: int
    reloaded_pages: int
    reloaded_bytes: int
    duplicate_pages: int  # acknowledged without a write: on disk already
    collected_pages: int
    index_commits: int
    write_errors: int
    read_failures: dict[str, int]  # by kind: io, checksum, foreign, torn, length, overtaken
    us_per_page_read: int  # recent, for the decision to reload or to compute; 0: nothing read yet
    failed_spills: int = 0  # operations: no slot, an error, or out of service
    out_of_service: str = ""  # why the disk takes no more writes, and how to get it back
    last_error: str = ""


class TierCounters(msgspec.Struct, frozen=True, kw_only=True):
    """The replicated core's own counters."""

    backup_pages: int = 0  # committed to L2
    backup_failed_pages: int = 0
    backup_skipped_pages: int = 0  # no room in L2, or the parent has no copy there
    loadback_pages: int = 0
    evicted_pages_l2: int = 0
    spill_nodes_listed: int = 0  # gauge: committed to L2 and not yet gathered
    spill_pages_pending: int = 0  # gauge: pages of listed nodes and of unsettled spills: lost if the server ended now
    spill_nodes_lost: int = 0  # evicted before their turn
    durable_pages: int = 0
    durable_failed_ops: int = 0
    spill_suspended: bool = False
    reloads: int = 0  # settled
    reload_pages: int = 0  # landed in L2
    reload_timeouts: int = 0
    holds: int = 0  # requests held for a reload
    quarantined_frames: int = 0  # gauge
    in_flight: dict[str, int] = {}  # gauge: operations by stream
