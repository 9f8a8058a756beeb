"""What memory the machine has for a host tier: hugepages, shared memory, ordinary memory and the container's limit.

`HostPools` is the one seam to the machine: a test passes any machine it likes. Parsers take the text of the kernel's
files (formats: proc(5), cgroups(7), the kernel's hugetlbpage.rst). No torch here: `benthic doctor` works without.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_V1_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number close to 2**63

ReadText = Callable[[Path], str | None]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest memory limit of the control groups that hold this process."""

    limit_bytes: int
    used_bytes: int  # without the page cache that the kernel gives back under pressure
    folder: Path


@dataclass(frozen=True, slots=True)
class HugepagePool:
    """One size of hugepages, in pages."""

    page_bytes: int
    total: int
    free: int
    reserved: int  # promised to mappings that have not touched them yet; part of `free`


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted filesystem."""

    path: str
    kind: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """A filesystem's size and what is free there, in bytes."""

    size_bytes: int
    free_bytes: int


class HostPools(Protocol):
    """Where memory can come from, as the machine says at the moment."""

    def shm_folder(self) -> str:
        """Where files in shared memory go."""

    def hugepages(self) -> Sequence[HugepagePool]:
        """The pools of hugepages, smallest pages first."""

    def mounts(self) -> Sequence[Mount]:
        """Mounted filesystems."""

    def room(self, path: str) -> Room | None:
        """The filesystem's room; None where it has no size limit of its own. Raises OSError where there is none."""

    def writable(self, path: str) -> bool:
        """Whether this user may create files in the folder."""

    def available_bytes(self) -> int:
        """Ordinary memory that can be taken without swapping."""

    def memory_limit(self) -> MemoryLimit | None:
        """The tightest limit of the control groups; None where nothing limits memory."""


class Machine:
    """HostPools of the machine at hand."""

    def shm_folder(self) -> str:
        return "/dev/shm"

    def hugepages(self) -> Sequence[HugepagePool]:
        return hugepage_pools(Path("/sys/kernel/mm/hugepages"), read_text)

    def mounts(self) -> Sequence[Mount]:
        return parse_mounts(read_text(Path("/proc/self/mounts")) or "")

    def room(self, path: str) -> Room | None:
        found = os.statvfs(path)
        if not found.f_blocks:  # a mount without a size limit reports no blocks
            return None
        return Room(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def writable(self, path: str) -> bool:
        return os.access(path, os.W_OK | os.X_OK)

    def available_bytes(self) -> int:
        return parse_meminfo(read_text(Path("/proc/meminfo")) or "").get("MemAvailable", 0)

    def memory_limit(self) -> MemoryLimit | None:
        folders = cgroup_folders("memory", read_text(Path("/proc/self/cgroup")) or "", self.mounts())
        return memory_limit(folders, read_text)


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as bytes (the hugepage counts, which have no unit, as they are)."""
    values = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\S+):\s+(\d+)( kB)?", line.strip())
        if match:
            values[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return values


def parse_mounts(text: str) -> list[Mount]:
    """/proc/self/mounts; the kernel writes a blank in a path as \\040."""
    mounts = []
    for line in text.splitlines():
        parts = line.split()
        if len(parts) >= 4:
            path = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), parts[1])
            mounts.append(Mount(path, parts[2], tuple(parts[3].split(","))))
    return mounts


def cgroup_folders(controller: str, cgroup: str, mounts: Sequence[Mount]) -> list[Path]:
    """The folders of this process's control groups from the leaf to the root, for one controller, v1 or v2.

    `cgroup` is /proc/self/cgroup. Inside a container the path may be the host's, which is not mounted: then the
    folders do not exist, except the last, the mount itself, which is the container's own group.
    """
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(","):
            roots = [m.path for m in mounts if m.kind == "cgroup" and controller in m.options]
        elif number == "0" and not names:
            roots = [m.path for m in mounts if m.kind == "cgroup2"]
        else:
            continue
        for root in roots:
            leaf = Path(root) / path.lstrip("/")
            return [leaf, *(p for p in leaf.parents if p == Path(root) or Path(root) in p.parents)]
    return []


def memory_limit(folders: Sequence[Path], read: ReadText) -> MemoryLimit | None:
    """The smallest limit among `folders`, or None where nothing limits memory."""
    limits = []
    for folder in folders:
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = read(folder / limit_file), read(folder / used_file)
            if limit is None or not limit.strip().isdigit() or int(limit) >= _V1_NO_LIMIT:
                continue
            match = re.search(r"^(?:total_)?inactive_file (\d+)$", read(folder / "memory.stat") or "", re.MULTILINE)
            cache = int(match[1]) if match else 0
            limits.append(MemoryLimit(int(limit), max(0, int(used or 0) - cache), folder))
    return min(limits, key=lambda found: found.limit_bytes, default=None)


def hugepage_pools(root: Path, read: ReadText) -> list[HugepagePool]:
    """The pools below /sys/kernel/mm/hugepages, smallest pages first."""
    pools = []
    for folder in root.glob("hugepages-*kB"):
        counts = [int(read(folder / f"{name}_hugepages") or 0) for name in ("nr", "free", "resv")]
        pools.append(HugepagePool(int(folder.name[len("hugepages-") : -len("kB")]) * 1024, *counts))
    return sorted(pools, key=lambda pool: pool.page_bytes)


def read_text(path: Path) -> str | None:
    """The file's text, or None where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
