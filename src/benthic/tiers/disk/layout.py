"""Which files a namespace has, on which disk, how large: the arithmetic of budgets, and the check of the disks' room.

    DIR/lock                             one server a folder
    DIR/<namespace>/manifest.toml        written last
    DIR/<namespace>/slab-<k>.dat         slots
    DIR/<namespace>/index-<k>.lmdb       and LMDB's own -lock file

File k belongs to rank k % num_ranks. Normally there is one a rank; after a restart with fewer ranks a rank has several.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benthic.common.errors import CapacityError, ConfigError
from benthic.common.units import KIB, format_size
from benthic.config.disk import DiskConfig, DiskSpec
from benthic.tiers.disk.format import FrameGeometry
from benthic.tiers.disk.index import map_bytes_for
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.disk.manifest import is_namespace
from benthic.tiers.disk.refusal import refusal

_SLAB = re.compile(r"slab-(\d+)\.dat")
_OWN_FILES = re.compile(r"slab-\d+\.dat|index-\d+\.lmdb(-lock)?|index-\d+\.lmdb\.new|manifest\.toml(\.new)?|probe")
_SMALL_FILES = 64 * KIB  # per slab file: LMDB's lock file, its share of the manifest, a folder's own blocks


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One slab file with its index."""

    number: int  # k
    disk: int  # which of the configuration's disks it lies on
    slab: Path
    index: Path
    num_slots: int
    index_bytes: int  # LMDB's map size, the most that the index takes

    def owner(self, num_ranks: int) -> int:
        """The rank that this file belongs to."""
        return self.number % num_ranks


def namespace_folder(disk: Path, namespace: bytes) -> Path:
    """Where the namespace's files lie on a disk."""
    return disk / namespace.hex()


def index_path(config: DiskConfig, namespace: bytes, disk: int, number: int) -> Path:
    """Where file `number`'s index lies."""
    base = config.disks[disk].path if config.index_dir is None else config.index_dir
    return namespace_folder(base, namespace) / f"index-{number}.lmdb"


def existing_slabs(folder: Path) -> dict[int, Path]:
    """The slab files in a namespace's folder, by number. Raises OSError, but not for a missing folder."""
    if not folder.is_dir():
        return {}
    names = {match: _SLAB.fullmatch(match) for match in sorted(os.listdir(folder))}
    return {int(match[1]): folder / name for name, match in names.items() if match is not None}


def is_own_file(name: str) -> bool:
    """Whether a file's name is one that a namespace's folder has."""
    return _OWN_FILES.fullmatch(name) is not None


def own_bytes(folder: Path) -> int:
    """Bytes that this floor's files in a namespace's folder take on the disk. Raises OSError."""
    if not folder.is_dir():
        return 0
    with os.scandir(folder) as found:
        return sum(entry.stat().st_blocks * 512 for entry in found if is_own_file(entry.name))


def other_namespaces(disk: Path, namespace: bytes | None) -> Iterator[tuple[str, int]]:
    """Namespaces in a disk's folder but for `namespace`, with their bytes, in order of name. Raises OSError."""
    for name in sorted(os.listdir(disk)):
        if is_namespace(name) and (namespace is None or name != namespace.hex()) and (disk / name).is_dir():
            yield name, own_bytes(disk / name)


def plan_files(config: DiskConfig, namespace: bytes, geometry: FrameGeometry, num_ranks: int) -> tuple[FilePlan, ...]:
    """The files that this configuration wants, in order of number: one a rank, and those that exist beyond.

    An existing slab stays on whichever disk it lies. Each disk's budget is divided evenly over its files.
    Raises CapacityError where that gives a file no slot, ConfigError where a file lies on two disks, OSError.
    """
    disk_of: dict[int, int] = {}
    for number, disk in enumerate(config.disks):
        for k, path in existing_slabs(namespace_folder(disk.path, namespace)).items():
            if k in disk_of:
                first = config.disks[disk_of[k]].path
                raise ConfigError(f"{path.name} lies in {first} and in {disk.path}; remove the copy")
            disk_of[k] = number
    for rank in range(num_ranks):
        disk_of.setdefault(rank, config.disk_of(rank))
    on_disk = list(disk_of.values())
    return tuple(
        _plan_file(config, namespace, geometry, k, disk_of[k], on_disk.count(disk_of[k])) for k in sorted(disk_of)
    )


def _plan_file(
    config: DiskConfig, namespace: bytes, geometry: FrameGeometry, number: int, disk: int, sharers: int
) -> FilePlan:
    spec = config.disks[disk]
    share = spec.budget_bytes // sharers - _SMALL_FILES
    index = index_path(config, namespace, disk, number)
    least_index = max(config.index_bytes or 0, index.stat().st_size if index.exists() else 0)
    index_is_here = config.index_dir is None or config.index_dir == spec.path
    num_slots = max(0, share) // geometry.slot_bytes
    while num_slots > 0:
        index_bytes = max(least_index, config.index_bytes or map_bytes_for(num_slots))
        over = num_slots * geometry.slot_bytes + (index_bytes if index_is_here else 0) - share
        if over <= 0:
            slab = namespace_folder(spec.path, namespace) / f"slab-{number}.dat"
            return FilePlan(number, disk, slab, index, num_slots, index_bytes)
        num_slots -= -(-over // geometry.slot_bytes)
    least = geometry.slot_bytes + max(least_index, map_bytes_for(1)) + _SMALL_FILES
    raise CapacityError(
        f"L3 in {spec.path}: {format_size(spec.budget_bytes)} for {sharers} file{'s' if sharers > 1 else ''} is too "
        f"little: one page with its index takes {format_size(least)}; give at least {format_size(sharers * least)}"
    )


def check_room(config: DiskConfig, namespace: bytes, files: tuple[FilePlan, ...], io: DiskIO) -> None:
    """Raises CapacityError if a disk's free space and what this namespace takes there already are below its budget.

    Folders on one filesystem count together; so do indexes that lie elsewhere.
    """
    wanted: dict[int, list[tuple[Path, int]]] = {}
    for disk in config.disks:
        wanted.setdefault(disk.path.stat().st_dev, []).append((disk.path, disk.budget_bytes))
    index_dir = config.index_dir
    if index_dir is not None and index_dir not in [disk.path for disk in config.disks]:
        need = sum(file.index_bytes + _SMALL_FILES for file in files)
        wanted.setdefault(index_dir.stat().st_dev, []).append((index_dir, need))
    for folders in wanted.values():
        need = sum(size for _, size in folders)
        free = io.free_bytes(folders[0][0])
        own = sum(own_bytes(namespace_folder(path, namespace)) for path, _ in folders)
        if need > free + own:
            raise CapacityError(_no_room([path for path, _ in folders], namespace, need, free, own))


def _no_room(folders: list[Path], namespace: bytes, need: int, free: int, own: int) -> str:
    where = " and ".join(str(path) for path in folders)
    text = (
        f"L3 in {where}: {format_size(need)} is asked for, but only {format_size(free + own)} can be had there "
        f"({format_size(free)} free, {format_size(own)} taken by this model's own files)"
    )
    others = [(path, name, size) for path in folders for name, size in other_namespaces(path, namespace) if size]
    if others:
        path, name, _ = max(others, key=lambda other: other[2])
        total = sum(size for _, _, size in others)
        text += (
            f"; {format_size(total)} is taken by {len(others)} other model{'s' if len(others) > 1 else ''} or "
            f"setting{'s' if len(others) > 1 else ''}: see `benthic cache ls {path}`, free the largest with "
            f"`benthic cache clear {path} --namespace {name[:12]}`"
        )
    return f"{text}; lower --l3-size, or free some room"


def make_folders(config: DiskConfig, namespace: bytes, io: DiskIO) -> list[Path]:
    """The namespace's folder on every disk, made if missing, the disks' folders too. Raises ConfigError."""
    made = []
    for base in config.folders:
        folder = namespace_folder(base, namespace)
        try:
            io.make_folder(folder)
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise refusal("make or write the cache folder", folder, error) from None
        made.append(folder)
    return made


def disk_folders(disks: tuple[DiskSpec, ...], namespace: bytes) -> list[Path]:
    """The namespace's folder on every disk."""
    return [namespace_folder(disk.path, namespace) for disk in disks]
