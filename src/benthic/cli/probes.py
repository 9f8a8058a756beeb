"""What `benthic doctor` reads from the machine: facts without verdicts.

Parsers take the text of the kernel's files as arguments (formats: proc(5), cgroups(7), the kernel's hugetlbpage.rst),
so that a test gives them any machine; the few functions that touch the machine itself stand at the end.
"""

import mmap
import os
import re
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benthic.tiers.host.pools import Mount, ReadText

BLOCK = 4096  # bytes; the unit of disk I/O


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The processor as /proc/cpuinfo tells it."""

    model: str
    threads: int
    cores: int  # physical
    flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class DiskSample:
    """What a temporary file in a folder showed."""

    direct_error: str | None  # why O_DIRECT did not work; None: it works
    write_seconds: tuple[float, ...]  # each: 4 KiB written, then fdatasync

    @property
    def median_s(self) -> float:
        return statistics.median(self.write_seconds)


def parse_cpuinfo(text: str) -> CpuInfo:
    """/proc/cpuinfo of x86-64 or Arm; what it leaves out reads as unknown, or as one core a thread."""
    model, flags, threads, cores, package = "unknown", frozenset[str](), 0, set(), "0"
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "processor":
            threads += 1
        elif key == "model name":
            model = value
        elif key in ("flags", "Features"):
            flags = frozenset(value.split())
        elif key == "physical id":
            package = value
        elif key == "core id":
            cores.add((package, value))
    return CpuInfo(model=model, threads=threads, cores=len(cores) or threads, flags=flags)


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The filesystem that holds `path` (absolute): the longest mount point above it, the latest where two are equal."""
    holding = [m for m in mounts if path == Path(m.path) or Path(m.path) in path.parents]
    return max(enumerate(holding), key=lambda pair: (len(pair[1].path), pair[0]))[1] if holding else None


def cpu_quota(folders: Sequence[Path], read: ReadText) -> float | None:
    """Processors' worth of time that the control groups allow, or None where nothing limits it."""
    quotas = []
    for folder in folders:
        both = (read(folder / "cpu.max") or "").split()  # v2: "200000 100000" or "max 100000"
        if not both:
            both = [(read(folder / f"cpu.cfs_{part}_us") or "").strip() for part in ("quota", "period")]  # v1; -1: none
        if len(both) == 2 and both[0].isdigit() and both[1].isdigit() and int(both[1]):
            quotas.append(int(both[0]) / int(both[1]))
    return min(quotas, default=None)


def effective_capabilities(status: str) -> int:
    """The CapEff bits of /proc/self/status; 0 where it does not say."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(match[1], 16) if match else 0


def missing_packages(requirements: Sequence[str], installed: Mapping[str, str]) -> list[str]:
    """Names in `requirements` (as in package metadata, extras skipped) that `installed` (name to version) lacks."""
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in requirements if "extra ==" not in line]
    known = {_plain(name) for name in installed}
    return [name for name in names if _plain(name) not in known]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sample_disk(folder: Path, num_writes: int = 64, limit_s: float = 2.0) -> DiskSample:
    """Write `num_writes` blocks of 4 KiB to a temporary file in `folder`, each with fdatasync; stop after `limit_s`.

    With O_DIRECT where the filesystem takes it, at open and at write. The file is removed. Raises OSError where the
    folder can't be written.
    """
    path = folder / f".benthic-doctor-{os.getpid()}-{secrets.token_hex(4)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        direct_error = None
        with mmap.mmap(-1, BLOCK) as block:  # anonymous memory is page-aligned, as O_DIRECT wants it
            block.write(os.urandom(BLOCK))
            try:
                direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
                try:
                    os.pwrite(direct, block, 0)
                except OSError:
                    os.close(direct)
                    raise
                os.close(fd)
                fd = direct
            except OSError as error:
                direct_error = os.strerror(error.errno or 0)
            return DiskSample(direct_error, _timed_writes(fd, block, num_writes, limit_s))
    finally:
        os.close(fd)
        path.unlink()


def _timed_writes(fd: int, block: mmap.mmap, num_writes: int, limit_s: float) -> tuple[float, ...]:
    seconds: list[float] = []
    for index in range(num_writes):
        start = time.perf_counter()
        os.pwrite(fd, block, index * BLOCK)
        os.fdatasync(fd)
        seconds.append(time.perf_counter() - start)
        if sum(seconds) > limit_s:
            break
    return tuple(seconds)
