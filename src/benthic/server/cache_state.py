"""What `/cache` shows of the tiers, and what `POST /cache/flush` takes and answers."""

from collections.abc import Sequence
from typing import Any

import msgspec

from benthic.common.errors import RequestError
from benthic.common.show import clip
from benthic.messages import CacheState, DiskStats, FlushDone, LaneState, TierCounters
from benthic.observability.rank_disks import RankDisks
from benthic.server.openai.schemas import FlushRequest

TIERS = ("l1", "l2", "l3")
FLUSHED_BY_DEFAULT = ("l1", "l2")


def flush_tiers(request: FlushRequest) -> tuple[str, ...]:
    """The tiers to flush, each once, from the top. Raises RequestError that names the field."""
    if request.tiers is None:
        return FLUSHED_BY_DEFAULT
    wrong = next((tier for tier in request.tiers if tier not in TIERS), None)
    if wrong is not None:
        raise RequestError(f"tiers: {clip(wrong)!r} is no tier; name some of {', '.join(TIERS)}", param="tiers")
    if not request.tiers:
        raise RequestError("tiers: is empty; name some of l1, l2, l3, or leave it out for l1 and l2", param="tiers")
    return tuple(tier for tier in TIERS if tier in request.tiers)


def flush_object(done: FlushDone) -> dict[str, Any]:
    """The answer to a flush, in pages: sums, and by tier. `message` says what held L3 up, where something did."""
    answer: dict[str, Any] = {
        "dropped_pages": sum(done.dropped.values()),
        "kept_pages": sum(done.kept.values()),
        "dropped": done.dropped,
        "kept": done.kept,
    }
    return answer | {"message": done.message} if done.message else answer


def cache_object(state: CacheState, disks: RankDisks, age_s: float) -> dict[str, Any]:
    """The whole of `/cache`: rank 0's answer, and the other ranks' disks."""
    return {
        "age_s": round(age_s, 3),
        "tick": state.tick,
        "page_size": state.page_size,
        "nodes": state.nodes,
        "tiers": {
            "l1": _lanes("pages", state.lanes),
            "l2": _host(state),
            "l3": _disk_floor(state.tiers, disks.beside(state.disks), num_lanes=len(state.lanes)),
        },
        "requests": {"running": state.running, "waiting": state.waiting, "held": state.held},
        "query_tokens": state.query_tokens,
        "hit_tokens": {"l1": state.hits_tokens_l1, "l2": state.hits_tokens_l2, "l3": state.hits_tokens_l3},
        "in_flight": state.tiers.in_flight,
        "evicted_pages": state.evicted_pages,
        "preemptions": state.preemptions,
        "tick_tiers_s": round(state.tick_tiers_s, 6),
        "digest": state.digest,
    }


def _lanes(unit: str, lanes: Sequence[LaneState]) -> dict[str, Any]:
    """Sums of the lanes, then each of them."""
    each = [msgspec.structs.asdict(lane) for lane in lanes]
    keys = ("total", "free", "cached", "private", "locked")
    return {f"{key}_{unit}": sum(lane[key] for lane in each) for key in keys} | {"lanes": each}


def _host(state: CacheState) -> dict[str, Any]:
    tiers = state.tiers
    return {"policy": state.policy or None} | _lanes("frames", state.l2_lanes) | {
        "quarantined_frames": tiers.quarantined_frames,
        "backup_pages": tiers.backup_pages,
        "backup_failed_pages": tiers.backup_failed_pages,
        "backup_skipped_pages": tiers.backup_skipped_pages,
        "loadback_pages": tiers.loadback_pages,
        "evicted_pages": tiers.evicted_pages_l2,
    }  # fmt: skip


def _disk_floor(tiers: TierCounters, disks: Sequence[DiskStats], num_lanes: int) -> dict[str, Any]:
    """Slots count as pages: with one lane and several disks each rank has its heads of the same pages."""
    total, used = [disk.slots_total for disk in disks], [disk.slots_used for disk in disks]
    return {
        "total_slots": sum(total) if num_lanes > 1 else min(total, default=0),
        "used_slots": sum(used) if num_lanes > 1 else max(used, default=0),
        "spill_suspended": tiers.spill_suspended,
        "spill_backlog_nodes": tiers.spill_nodes_listed,
        "spill_pending_pages": tiers.spill_pages_pending,
        "spill_lost_nodes": tiers.spill_nodes_lost,
        "durable_pages": tiers.durable_pages,
        "durable_failed_operations": tiers.durable_failed_ops,
        "holds": tiers.holds,
        "reloads": tiers.reloads,
        "reload_pages": tiers.reload_pages,
        "reload_timeouts": tiers.reload_timeouts,
        "disks": [_disk(disk) for disk in disks],
    }


def _disk(disk: DiskStats) -> dict[str, Any]:
    """One rank's part; `out_of_service` is null, or says why and how to get the disk back."""
    shown = msgspec.structs.asdict(disk)
    return shown | {
        "total_bytes": disk.slots_total * disk.slot_bytes,
        "used_bytes": disk.slots_used * disk.slot_bytes,
        "out_of_service": disk.out_of_service or None,
        "last_error": disk.last_error or None,
    }
