"""How the disk floor (L3) is laid over disks, and its bounds."""

from dataclasses import dataclass
from pathlib import Path

from benthic.common.errors import ConfigError
from benthic.common.units import format_size

DEFAULT_STAGING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpec:
    """One disk: a folder on it and the bytes that this namespace's files there may take together, index included."""

    path: Path
    budget_bytes: int

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0:
            raise ConfigError(f"L3 in {self.path}: a size of {self.budget_bytes} bytes; give it room, e.g. 200GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """The disk floor. `l2_lane`-dependent bounds are checked where the frame's size is known.

    Raises ConfigError for a value out of its range, naming the range.
    """

    disks: tuple[DiskSpec, ...]
    rank_disks: tuple[int, ...] | None = None  # disk of each rank; None: rank % number of disks
    index_dir: Path | None = None  # folder for the indexes; None: beside the slab
    index_bytes: int | None = None  # LMDB map size at start; None: from the slot count
    cold_start: str = "load"  # load | clear
    min_pages: int = 1  # a shorter missing suffix is computed rather than looked for
    spill_min_hits: int = 0  # spill a node only after so many hits; 0: as soon as it is committed to L2
    require_plp: bool = False  # refuse a disk without power-loss protection
    staging_bytes: int | None = None  # per rank: buffers between L2 and the disk; None: `staging_for`
    spill_max_inflight: int = 64  # spill operations
    reload_max_inflight: int = 8  # reload operations, draining ones included
    reload_timeout_s: float = 2.0  # base of every deadline; the agreed seconds a page come on top
    queue_depth: int = 8  # transfers under way at once, per disk
    collect_start: float = 0.90  # share of slots in use at which collecting starts, and at which it stops
    collect_stop: float = 0.85

    def __post_init__(self) -> None:
        self._check_disks()
        if self.cold_start not in ("load", "clear"):
            raise ConfigError(f"L3 cold_start: {self.cold_start!r} is not a mode; it must be load or clear")
        for name, least in (
            ("min_pages", 1), ("spill_min_hits", 0), ("spill_max_inflight", 1), ("reload_max_inflight", 1),
            ("queue_depth", 1), ("staging_bytes", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"L3 {name}: {value} is too little; it must be at least {least}")
        if self.index_bytes is not None and self.index_bytes < 1 << 20:
            raise ConfigError(f"L3 index_bytes: {format_size(self.index_bytes)} is too little; at least 1 MiB")
        if not 0 < self.reload_timeout_s <= 600:
            raise ConfigError(
                f"L3 reload_timeout_s: {self.reload_timeout_s} is out of range; more than 0 and at most 600 seconds"
            )
        if not 0 < self.collect_stop < self.collect_start <= 1:
            raise ConfigError(
                f"L3 collect_start {self.collect_start} and collect_stop {self.collect_stop}: "
                f"expected 0 < collect_stop < collect_start <= 1, e.g. 0.90 and 0.85"
            )

    def _check_disks(self) -> None:
        if not self.disks:
            raise ConfigError("L3: no disk is named; expected at least one with a path and a size")
        paths = [disk.path for disk in self.disks]
        for path in paths:
            if paths.count(path) > 1:
                raise ConfigError(f"L3: {path} is named {paths.count(path)} times; each disk needs a folder of its own")
        if self.rank_disks is not None:
            if not self.rank_disks:
                raise ConfigError("L3 rank_disks: empty; expected a disk's number for each rank, or leave it out")
            for rank, disk in enumerate(self.rank_disks):
                if not 0 <= disk < len(self.disks):
                    raise ConfigError(
                        f"L3 rank_disks: rank {rank} is given disk {disk}; expected 0 … {len(self.disks) - 1}, "
                        f"as {len(self.disks)} are named"
                    )

    def staging_for(self, slot_bytes: int) -> int:
        """Bytes of staging buffers; left out: 256 MiB, or 64 slots where that is more."""
        return self.staging_bytes or max(DEFAULT_STAGING_BYTES, 64 * slot_bytes)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Every folder that is written to, and so locked: the disks' and the indexes' own."""
        paths = [disk.path for disk in self.disks]
        if self.index_dir is not None and self.index_dir not in paths:
            paths.append(self.index_dir)
        return tuple(paths)

    def disk_of(self, rank: int) -> int:
        """The disk on which the rank's files are made. Raises ConfigError if `rank_disks` is too short."""
        if self.rank_disks is None:
            return rank % len(self.disks)
        if rank >= len(self.rank_disks):
            raise ConfigError(f"L3 rank_disks: {len(self.rank_disks)} entries, but there is a rank {rank}; name all")
        return self.rank_disks[rank]
