"""Prometheus series of the tiers: lanes of L1 and L2 and each rank's disk, and what the replicated core counts once
for the group. There with or without an L3, so that a dashboard needs no cases.

The labels: with context parallelism each rank keeps one lane of the cache, `cp_rank` of `cp_size`. With tensor
parallelism there is one lane, of which each rank keeps its heads: pages are counted once, disks by `tp_rank`.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from benthic.messages import DiskStats, LaneState, Stats, TierCounters

RANK_LABELS = ("cp_rank", "cp_size", "tp_rank")

_COUNTERS: tuple[tuple[str, str, Callable[[TierCounters], int]], ...] = (
    ("l2_backup_pages", "Pages committed to L2", lambda t: t.backup_pages),
    ("l2_backup_failed_pages", "Pages whose copy to L2 failed", lambda t: t.backup_failed_pages),
    ("l2_backup_skipped_pages", "Pages that found no room or no parent in L2", lambda t: t.backup_skipped_pages),
    ("l2_loadback_pages", "Pages copied from L2 to L1", lambda t: t.loadback_pages),
    ("l2_evicted_pages", "Pages dropped from L2 to make room", lambda t: t.evicted_pages_l2),
    ("l3_durable_pages", "Pages that became durable on every rank", lambda t: t.durable_pages),
    ("l3_durable_failed_operations", "Spills that failed on a rank", lambda t: t.durable_failed_ops),
    ("l3_spill_lost_nodes", "Nodes evicted from L2 before their spill's turn", lambda t: t.spill_nodes_lost),
    ("l3_reloads", "Reloads that settled", lambda t: t.reloads),
    ("l3_reload_landed_pages", "Pages that reloads brought to L2", lambda t: t.reload_pages),
    ("l3_reload_timeouts", "Lookups and reloads that passed their deadline", lambda t: t.reload_timeouts),
    ("l3_holds", "Requests that were held for a reload", lambda t: t.holds),
)
_GAUGES: tuple[tuple[str, str, Callable[[TierCounters], int]], ...] = (
    ("l3_spill_backlog_nodes", "Nodes in L2 whose spill has not begun", lambda t: t.spill_nodes_listed),
    ("l3_spill_pending_pages", "Pages on their way to disk, not durable yet", lambda t: t.spill_pages_pending),
    ("l3_spill_suspended", "1 while nothing is spilled after repeated failures", lambda t: int(t.spill_suspended)),
    ("l2_quarantined_frames", "Frames that late reads may still write to", lambda t: t.quarantined_frames),
)
_DISK_GAUGES: tuple[tuple[str, str, Callable[[DiskStats], int]], ...] = (
    ("capacity_slots", "Slots of the rank's file", lambda d: d.slots_total),
    ("used_slots", "Slots live or being written", lambda d: d.slots_used),
    ("retired_slots", "Slots out of use after an I/O error", lambda d: d.slots_retired),
    ("slot_bytes", "Bytes of a slot", lambda d: d.slot_bytes),
    ("staging_capacity_buffers", "Buffers between L2 and the disk", lambda d: d.staging_total),
    ("staging_used_buffers", "Buffers that hold a page", lambda d: d.staging_used),
    ("write_queue_pages", "Pages that wait for a writer or are being written", lambda d: d.write_queue),
    ("read_queue_pages", "Pages that wait for a reader or are being read", lambda d: d.read_queue),
    ("out_of_service", "1 when the disk takes no more writes; /cache says why", lambda d: int(bool(d.out_of_service))),
)
_DISK_COUNTERS: tuple[tuple[str, str, Callable[[DiskStats], int]], ...] = (
    ("spilled_pages", "Pages written and durable", lambda d: d.spilled_pages),
    ("spilled_bytes", "Bytes of these pages", lambda d: d.spilled_bytes),
    ("reloaded_pages", "Pages read and verified", lambda d: d.reloaded_pages),
    ("reloaded_bytes", "Bytes of these pages", lambda d: d.reloaded_bytes),
    ("duplicate_pages", "Pages acknowledged without a write: on disk already", lambda d: d.duplicate_pages),
    ("collected_pages", "Pages dropped from disk to make room", lambda d: d.collected_pages),
    ("index_commits", "Transactions of the index", lambda d: d.index_commits),
    ("failed_spills", "Spills that this rank could not write", lambda d: d.failed_spills),
    ("write_errors", "Writes, syncs and commits that failed", lambda d: d.write_errors),
)


def tier_families(stats: Stats, disks: Sequence[DiskStats]) -> Iterable[Metric]:
    """Every family of the tiers below the queue; `disks` of all ranks."""
    yield from lane_families("l1", "pages", stats.lanes)
    yield from lane_families("l2", "frames", stats.l2_lanes)
    yield from counter_families(stats.tiers)
    yield from disk_families(disks, cp_size=len(stats.lanes))


def lane_families(tier: str, unit: str, lanes: Sequence[LaneState]) -> Iterable[Metric]:
    """Capacity and use of a tier, once a lane, and how uneven the lanes are."""
    size = str(len(lanes))

    def family(name: str, text: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"benthic_{tier}_{name}", text, labels=(*RANK_LABELS, *more))

    capacity = family(f"capacity_{unit}", f"{unit.capitalize()} of the lane")
    used = family(f"used_{unit}", f"{unit.capitalize()} that are not free")
    locked = family(f"locked_{unit}", f"Cached {unit} under a running request or operation")
    by_state = family(unit, f"{unit.capitalize()} by state", "state")
    for lane in lanes:
        labels = [str(lane.lane), size, "0"]
        capacity.add_metric(labels, lane.total)
        used.add_metric(labels, lane.total - lane.free)
        locked.add_metric(labels, lane.locked)
        for state, value in (("free", lane.free), ("cached", lane.cached), ("private", lane.private)):
            by_state.add_metric([*labels, state], value)
    yield from (capacity, used, locked, by_state)
    yield GaugeMetricFamily(
        f"benthic_{tier}_lane_imbalance",
        f"Used {unit} of the fullest lane over the mean of the lanes, less 1",
        value=imbalance(lanes),
    )


def imbalance(lanes: Sequence[LaneState]) -> float:
    """0 where all lanes hold as much; n - 1 where one of n holds everything: the tightest lane bounds admission."""
    used = [lane.total - lane.free for lane in lanes]
    return max(used) * len(used) / sum(used) - 1 if sum(used) else 0.0


def counter_families(tiers: TierCounters) -> Iterable[Metric]:
    """What the core counts: equal on every rank, so once."""
    for name, text, value in _COUNTERS:
        yield CounterMetricFamily(f"benthic_{name}", text, value=value(tiers))
    for name, text, value in _GAUGES:
        yield GaugeMetricFamily(f"benthic_{name}", text, value=value(tiers))
    in_flight = GaugeMetricFamily("benthic_in_flight_operations", "Operations not settled yet", labels=("stream",))
    for stream, count in sorted(tiers.in_flight.items()):
        in_flight.add_metric([stream], count)
    yield in_flight


def disk_families(disks: Sequence[DiskStats], cp_size: int) -> Iterable[Metric]:
    """Each rank's part of the disk floor, once a rank."""
    labels = {disk.rank: _labels(disk.rank, cp_size) for disk in disks}
    for name, text, value in _DISK_GAUGES:
        gauge = GaugeMetricFamily(f"benthic_l3_{name}", text, labels=RANK_LABELS)
        for disk in disks:
            gauge.add_metric(labels[disk.rank], value(disk))
        yield gauge
    for name, text, value in _DISK_COUNTERS:
        counter = CounterMetricFamily(f"benthic_l3_{name}", text, labels=RANK_LABELS)
        for disk in disks:
            counter.add_metric(labels[disk.rank], value(disk))
        yield counter
    failures = CounterMetricFamily(
        "benthic_l3_read_failures", "Pages that could not be given back: misses", labels=(*RANK_LABELS, "kind")
    )
    for disk in disks:
        for kind, count in sorted(disk.read_failures.items()):
            failures.add_metric([*labels[disk.rank], kind], count)
    yield failures


def _labels(rank: int, cp_size: int) -> list[str]:
    """RANK_LABELS: several lanes are context parallelism, so with one lane ranks differ in their heads."""
    return [str(rank), str(cp_size), "0"] if cp_size > 1 else ["0", "1", str(rank)]
