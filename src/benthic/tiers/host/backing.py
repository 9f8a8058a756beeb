"""Which memory a host tier takes, and whether there is enough: each kind is checked against the pool it comes from.

    hugetlbfs    free - reserved hugepages of the mount's page size, and the mount's own limit where it has one
    shm          the size of /dev/shm, what memory is available, and the control group's limit

Reserved hugepages are not available as ordinary memory, so a host tier in hugepages is not checked against that.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benthic.common.errors import CapacityError, ConfigError
from benthic.common.layout import ceil_div
from benthic.common.units import GIB, MIB, format_size, parse_size
from benthic.tiers.host.pools import HostPools, Mount

SMALL_PAGE = 4096  # bytes


@dataclass(frozen=True, slots=True)
class Backing:
    """A kind of memory, the folder that gives it, and the unit that it comes in."""

    kind: Literal["shm", "hugetlbfs"]
    folder: Path
    page_bytes: int


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """How frames are laid over slabs: no frame straddles two."""

    frame_bytes: int
    frames_per_slab: int
    slab_bytes: tuple[int, ...]  # of each slab, in whole pages of its memory

    @property
    def total_bytes(self) -> int:
        return sum(self.slab_bytes)


def plan_slabs(frame_bytes: int, num_frames: int, max_slab_bytes: int, page_bytes: int) -> SlabPlan:
    """As few slabs as `max_slab_bytes` allows. Raises ConfigError where not even one frame fits into a slab."""
    assert num_frames > 0
    frames_per_slab = min(num_frames, max_slab_bytes // page_bytes * page_bytes // frame_bytes)
    if frames_per_slab == 0:
        needed = ceil_div(frame_bytes, page_bytes) * page_bytes
        raise ConfigError(
            f"BENTHIC_MAX_SLAB_GIB={max_slab_bytes / GIB:g}: a slab of {format_size(max_slab_bytes)} in pages of "
            f"{format_size(page_bytes)} holds no frame of {format_size(frame_bytes)}; "
            f"set it to at least {needed / GIB:.6f}, or leave it unset"
        )
    sizes = []
    for first in range(0, num_frames, frames_per_slab):
        used = min(frames_per_slab, num_frames - first) * frame_bytes
        sizes.append(ceil_div(used, page_bytes) * page_bytes)
    return SlabPlan(frame_bytes, frames_per_slab, tuple(sizes))


def check_capacity(l2_bytes: int, wish: str, pools: HostPools) -> Backing:
    """What `--l2-backing` `wish` means here for `l2_bytes`. Raises CapacityError or ConfigError where it can't be had.

    A server calls it before it loads anything, `benthic doctor` when it is asked: both say the same.
    """
    backing = choose_backing(wish, l2_bytes, pools)
    demand_room(backing, l2_bytes, pools)
    return backing


def choose_backing(wish: str, need_bytes: int, pools: HostPools) -> Backing:
    """The memory that `wish` (auto, shm, hugetlbfs, hugetlbfs:MOUNT) names; auto: hugepages where all of it fits.

    Raises ConfigError where a mount is asked for that does not exist.
    """
    kind, _, path = wish.partition(":")
    mounts = [mount for mount in pools.mounts() if mount.kind == "hugetlbfs"]
    if kind == "shm":
        return Backing("shm", Path(pools.shm_folder()), SMALL_PAGE)
    if kind == "auto":
        for mount in mounts:
            backing = _hugetlbfs(mount)
            if pools.writable(mount.path) and _hugepage_bytes(backing, pools) >= need_bytes:
                return backing
        return Backing("shm", Path(pools.shm_folder()), SMALL_PAGE)
    return _hugetlbfs(_named_mount(path, mounts))


def demand_room(backing: Backing, need_bytes: int, pools: HostPools, pending_bytes: int = 0) -> None:
    """Raises CapacityError where `need_bytes` more can't be had.

    `pending_bytes` were promised before, but not yet taken, so that the pool still shows them as free.
    """
    if backing.kind == "hugetlbfs":
        free = _hugepage_bytes(backing, pools)
        need = ceil_div(need_bytes, backing.page_bytes) * backing.page_bytes
        if need > free:
            raise CapacityError(
                f"insufficient hugepages in {backing.folder}: need {_gib(need)} ({need // backing.page_bytes} "
                f"× {_page_size(backing.page_bytes)} pages), "  # noqa: RUF001  # a real sign, between two numbers
                f"{_gib(free)} free; reserve more or lower --l2-size"
            )
        return
    need = need_bytes + pending_bytes
    _demand_shared(backing, need, pools)
    _demand_memory(need, pools)


def _demand_shared(backing: Backing, need: int, pools: HostPools) -> None:
    try:
        room = pools.room(str(backing.folder))
    except OSError as error:
        raise CapacityError(
            f"no shared memory in {backing.folder}: {error.strerror or error}; need {_gib(need)}; "
            f"mount it (mount -t tmpfs tmpfs {backing.folder}) or leave out --l2-size"
        ) from None
    if room is not None and need > room.free_bytes:
        size = f"{ceil_div(need + room.size_bytes - room.free_bytes, GIB)}g"
        raise CapacityError(
            f"insufficient shared memory in {backing.folder}: need {_gib(need)}, {_gib(room.free_bytes)} free; "
            f"enlarge it (mount -o remount,size={size} {backing.folder}; docker run --shm-size {size}) "
            f"or lower --l2-size"
        )


def _demand_memory(need: int, pools: HostPools) -> None:
    free, remedy, where = pools.available_bytes(), "free memory", "available"
    limit = pools.memory_limit()
    if limit is not None and limit.limit_bytes - limit.used_bytes < free:
        free = max(0, limit.limit_bytes - limit.used_bytes)
        where = f"left of the control group's {_gib(limit.limit_bytes)}"
        remedy = "raise the container's memory limit"
    if need > free:
        raise CapacityError(
            f"insufficient memory: need {_gib(need)}, {_gib(free)} {where}; {remedy} or lower --l2-size"
        )


def _hugepage_bytes(backing: Backing, pools: HostPools) -> int:
    """Bytes that the mount can still promise: reserved pages are free, but somebody's."""
    pool = next((pool for pool in pools.hugepages() if pool.page_bytes == backing.page_bytes), None)
    free = 0 if pool is None else max(0, pool.free - pool.reserved) * backing.page_bytes
    try:
        room = pools.room(str(backing.folder))
    except OSError:
        return 0
    return free if room is None else min(free, room.free_bytes)


def _named_mount(path: str, mounts: Sequence[Mount]) -> Mount:
    if not mounts:
        raise ConfigError(
            "--l2-backing hugetlbfs: no hugetlbfs is mounted; "
            "mount -t hugetlbfs none /dev/hugepages, or use --l2-backing shm"
        )
    if not path:
        return mounts[0]
    wanted = str(Path(path))
    found = next((mount for mount in mounts if mount.path == wanted), None)
    if found is None:
        names = ", ".join(mount.path for mount in mounts)
        raise ConfigError(f"--l2-backing hugetlbfs:{path}: no hugetlbfs is mounted there; mounted: {names}")
    return found


def _hugetlbfs(mount: Mount) -> Backing:
    size = next((option.partition("=")[2] for option in mount.options if option.startswith("pagesize=")), "2M")
    page_bytes = parse_size(re.sub(r"[^0-9A-Za-z]", "", size), f"pagesize of {mount.path}")
    return Backing("hugetlbfs", Path(mount.path), page_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _page_size(num_bytes: int) -> str:
    return f"{num_bytes // GIB} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"
