"""What the engine tells about itself: the answers to QueryState, and the stats that become metrics."""

from benthic.engine.scheduler import Scheduler
from benthic.kvcache import CacheCore, LaneCounts, Stream
from benthic.messages import LaneState, TierCounters


def lane_states(core: CacheCore) -> tuple[LaneState, ...]:
    """Each lane of L1 in pages, by what they hold."""
    return _states(core.lanes())


def l2_lane_states(core: CacheCore) -> tuple[LaneState, ...]:
    """Each lane of L2 in frames; none without a host tier."""
    return _states(core.l2_lanes())


def _states(lanes: list[LaneCounts]) -> tuple[LaneState, ...]:
    return tuple(
        LaneState(lane=i, total=c.total, free=c.free, cached=c.cached, private=c.private, locked=c.locked)
        for i, c in enumerate(lanes)
    )


def tier_counters(core: CacheCore) -> TierCounters:
    """The core's own counters of L2 and L3, and gauges of the moment."""
    c, ops = core.counters, core.state.ops
    return TierCounters(
        backup_pages=c.backed_up,
        backup_failed_pages=c.backup_failed,
        backup_skipped_pages=c.backup_skipped,
        loadback_pages=c.loaded_back,
        evicted_pages_l2=c.evicted_l2,
        spill_nodes_listed=len(core.spills.listed),
        spill_pages_pending=pages_pending(core),
        spill_nodes_lost=c.spill_nodes_lost,
        durable_pages=c.durable,
        durable_failed_ops=c.durable_failed_ops,
        spill_suspended=core.spills.suspended,
        reloads=c.reloads,
        reload_pages=c.reloaded,
        reload_timeouts=c.reload_timeouts,
        holds=c.holds,
        quarantined_frames=sum(op.num_pages for op in ops.of(Stream.DRAIN).values()),
        in_flight={stream.name.lower(): len(ops.of(stream)) for stream in Stream},
    )


def pages_pending(core: CacheCore) -> int:
    """Pages that would be missing on disk if the engine ended now: listed, and in unsettled spills."""
    listed = sum(len(node.hashes) for node in core.spills.listed.values())
    return listed + sum(op.num_pages for op in core.state.ops.of(Stream.DURABLE).values())


def waiting(scheduler: Scheduler) -> int:
    """Requests that wait for admission."""
    return len(scheduler.waiting) + len(scheduler.draining)
