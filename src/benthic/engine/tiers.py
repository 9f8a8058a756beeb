"""From the configuration to L2 and L3 at work, in two steps: memory and files before the weights load, so that what
can't be had is refused at once; threads when the L1 pool is there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benthic.common.errors import CapacityError, ConfigError
from benthic.common.layout import ceil_div
from benthic.common.units import format_size
from benthic.config import CacheConfig
from benthic.engine.plan import SchedulerLimits
from benthic.engine.shared_tiers import map_slabs, open_floors
from benthic.engine.tier_workers import TierWorkers
from benthic.kvcache import CoreConfig
from benthic.kvcache.tree import MAX_NODE_PAGES
from benthic.messages import Derived
from benthic.models.registry import Namespace
from benthic.parallel.control import gather_ints
from benthic.parallel.launch import ALONE, Ranks
from benthic.parallel.layout import SINGLE, ParallelLayout
from benthic.tiers.disk.floor import RankFloor
from benthic.tiers.disk.format import FrameGeometry
from benthic.tiers.disk.io import DiskIO, SystemDisk
from benthic.tiers.disk.layout import other_namespaces
from benthic.tiers.disk.store import DiskStore
from benthic.tiers.host.cpu_copies import cpu_copies
from benthic.tiers.host.cuda_copies import cuda_copies
from benthic.tiers.host.layout import FrameLayout
from benthic.tiers.host.slabs import HostSlabs, SlabGeometry

Progress = Callable[[str, int, int], None]  # what, done, total

PAYLOAD_BITS = {"target_kv": 0, "index_k": 1, "draft_kv": 2}  # in a slot's header


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """L2's memory and L3's files, open; nothing runs yet. `frames` and `staging`: of each lane; 0 without the tier."""

    frames: int
    staging: int
    slabs: HostSlabs | None
    floor: RankFloor | None
    layout: FrameLayout
    rows: tuple[Derived, ...]
    tidy: bool = True  # no rank has pages on disk that are another's, nor knows of own ones in another's files

    def close(self) -> None:
        """Give memory and files back where no workers have been started on them."""
        if self.floor is not None:
            self.floor.close()
        if self.slabs is not None:
            self.slabs.close()


def open_tiers(
    config: CacheConfig,
    layout: FrameLayout,
    namespace: Namespace,
    device: torch.device,
    progress: Progress,
    *,
    disk_io: DiskIO | None = None,
    ranks: Ranks = ALONE,
) -> LowerTiers:
    """Map the host slabs and open the disk floor, together with all ranks; `disk_io` is for tests (faults).

    Raises CapacityError and ConfigError with numbers and remedy.
    """
    if not config.l2_bytes:
        return LowerTiers(0, 0, None, None, layout, (Derived("L2, L3", "none", "no --l2-size"),))
    place = ranks.layout
    frames = ranks.least(_frames_per_lane(config, layout, place))  # hosts may have different numbers of ranks
    staging = _staging_frames(config, layout, place.cp_size)
    geometry = SlabGeometry(
        frame_bytes=layout.frame_bytes,
        frames_per_lane=frames,
        num_owners=place.local_size,
        max_slab_bytes=config.max_slab_bytes,
    )
    slabs = map_slabs(geometry, config.l2_backing, ranks)
    floor, tidy = None, True
    try:
        slabs.fault_in(lambda done, total: progress("host memory for L2", done, total))
        rows = [
            _l2_row(slabs, frames * place.local_size, layout),
            Derived("--l2-policy", config.l2_policy, "when L2 is filled"),
        ]
        if device.type == "cuda":
            report = slabs.register_cuda()
            rows.append(Derived("L2 pinned", "yes" if report.pinned else "no", report.reason or "copies at link rate"))
        if config.disk is not None:
            floor, tidy = open_floors(
                config.disk, namespace, _geometry(layout), ranks, disk_io or SystemDisk(), progress
            )
            rows += _l3_rows(config, floor, _floors(namespace, ranks), staging, place)
    except BaseException:
        if floor is not None:
            floor.close()
        slabs.close()
        raise
    return LowerTiers(frames, staging, slabs, floor, layout, tuple(rows), tidy)


def start_workers(
    tiers: LowerTiers, config: CacheConfig, pools: Mapping[str, torch.Tensor], place: ParallelLayout = SINGLE
) -> TierWorkers:
    """The threads, over the L1 pools by payload name: [layers, pages + 1, …]."""
    if tiers.slabs is None:
        return TierWorkers(rank=place.cp_rank, num_owners=place.cp_size)
    on_gpu = next(iter(pools.values())).device.type == "cuda"
    copies = (cuda_copies if on_gpu else cpu_copies)(tiers.slabs, tiers.layout, pools)
    disk = None
    if tiers.floor is not None:
        assert config.disk is not None
        depth = max(1, config.disk.queue_depth * len(config.disk.disks) // place.local_size)
        disk = DiskStore(
            tiers.floor,
            config.disk,
            rank=place.rank,
            num_owners=place.cp_size,
            frames=tiers.slabs,
            queue_depth=None if place.local_size == 1 else depth,
        )
    return TierWorkers(rank=place.cp_rank, num_owners=place.cp_size, copies=copies, disk=disk, slabs=tiers.slabs)


def core_config(
    config: CacheConfig, limits: SchedulerLimits, tiers: LowerTiers, l1_pages: int, num_owners: int = 1
) -> CoreConfig:
    """The sizes that the core decides by."""
    disk = config.disk
    lower = CoreConfig(
        num_owners=num_owners,
        l1_pages=l1_pages,
        l1_free_pages=limits.l1_free_pages,
        l2_frames=tiers.frames,
        policy=config.l2_policy,
    )
    if disk is None:
        return lower
    return replace(
        lower,
        disk=True,
        staging_frames=tiers.staging,
        spill_max_inflight=disk.spill_max_inflight,
        spill_min_hits=disk.spill_min_hits,
        reload_max_inflight=disk.reload_max_inflight,
        reload_timeout_us=int(disk.reload_timeout_s * 1e6),
        reload_min_pages=disk.min_pages,
        # pages in a file that is not their owner's go there with their next spill
        reload_marks=tiers.tidy,
    )


def _frames_per_lane(config: CacheConfig, layout: FrameLayout, place: ParallelLayout) -> int:
    lanes = place.local_size
    frames = config.l2_bytes // layout.frame_bytes // lanes
    least = ceil_div(2 * MAX_NODE_PAGES, place.cp_size)
    if frames < least:
        raise CapacityError(
            f"--l2-size {format_size(config.l2_bytes)} holds {frames * lanes} frames of "
            f"{format_size(layout.frame_bytes)}; at least {least * lanes} are needed: "
            f"{format_size(least * lanes * layout.frame_bytes)}"
        )
    return frames


def _staging_frames(config: CacheConfig, layout: FrameLayout, num_owners: int) -> int:
    if config.disk is None:
        return 0
    slot = _geometry(layout).slot_bytes
    given = config.disk.staging_for(slot)
    staging = given // slot
    least = ceil_div(MAX_NODE_PAGES, num_owners)
    if staging < least:
        raise ConfigError(
            f"L3 staging_size {format_size(given)} holds {staging} buffers of {format_size(slot)}; "
            f"a spill takes up to {least} at once: give at least {format_size(least * slot)}"
        )
    return staging


def _geometry(layout: FrameLayout) -> FrameGeometry:
    return FrameGeometry(
        frame_bytes=layout.frame_bytes,
        payload_mask=sum(1 << PAYLOAD_BITS[payload.name] for payload in layout.payloads),
        payloads=tuple((payload.name, payload.num_bytes) for payload in layout.payloads),
    )


def _l2_row(slabs: HostSlabs, frames: int, layout: FrameLayout) -> Derived:
    backing = slabs.segment.backing
    count = len(slabs.plan.slab_bytes)
    where = f"{backing.kind} in {backing.folder}" + (f", {count} slabs" if count > 1 else "")
    return Derived("L2", f"{frames} frames = {format_size(frames * layout.frame_bytes)}", f"--l2-size; {where}")


def _floors(namespace: Namespace, ranks: Ranks) -> tuple[bytes, ...]:
    """How the namespaces of all ranks begin; with tensor parallelism each has its own. One exchange."""
    length = 7  # bytes: what `gather_ints` takes
    found = gather_ints(ranks.start, int.from_bytes(namespace.digest[:length], "big"))
    return tuple(start.to_bytes(length, "big") for start in found)


def _l3_rows(
    config: CacheConfig, floor: RankFloor, own: Sequence[bytes], staging: int, place: ParallelLayout
) -> list[Derived]:
    """`own`: how the namespaces that are in use begin."""
    assert config.disk is not None
    report, slot = floor.report, floor.slab.slot_bytes
    each = "" if place.world_size == 1 else f" of {place.name}, as the others"
    rows = [
        Derived(
            "L3",
            f"{report.num_slots} slots = {format_size(report.num_slots * slot)}{each}",
            f"{floor.slab.path}; {'O_DIRECT' if floor.slab.direct else 'buffered'}",
        ),
        Derived("L3 pages found", f"{report.live_pages}{each}", f"{config.disk.cold_start}; {report.seconds:.1f} s"),
        Derived("L3 staging", f"{staging} buffers of {format_size(slot)}", "staging_size"),
    ]
    for disk in config.disk.disks:
        rows += [
            Derived("L3, another model's", f"{name[:12]}… {format_size(size)}", f"in {disk.path}; left alone")
            for name, size in other_namespaces(disk.path, None)
            if not bytes.fromhex(name).startswith(tuple(own))
        ]
    return rows
