"""Does a disk have power-loss protection? Told by how long a small write takes to be durable.

A disk with capacitors answers a flush from its own memory, in tens of microseconds; one without has to program flash
or turn a platter first, which takes from about half a millisecond upwards.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benthic.common.errors import ConfigError
from benthic.tiers.disk.format import PAGE
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.disk.slab import aligned_buffer

PROTECTED_BELOW_US = 300
_ROUNDS = 12
_PROBE_NAME = "probe"
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class PlpProbe:
    """What was measured in one folder."""

    folder: Path
    filesystem: str  # as in /proc/self/mountinfo; "" if unknown
    median_us: float | None  # of an O_DIRECT write and fdatasync; None: no O_DIRECT here, so nothing is known
    error: str = ""  # why there is no figure

    @property
    def protected(self) -> bool:
        """Whether the disk keeps what it has acknowledged when the power goes, as far as latency tells."""
        fast = self.median_us is not None and self.median_us < PROTECTED_BELOW_US
        return fast and self.filesystem not in _IN_MEMORY

    def __str__(self) -> str:
        if self.filesystem in _IN_MEMORY:
            return f"{self.filesystem}: memory, lost at a reboot"
        if self.median_us is None:
            return f"power-loss protection unknown ({self.error})"
        kind = "power-loss protected" if self.protected else "no power-loss protection"
        return f"{kind} (4 KiB write + fdatasync: {self.median_us:.0f} us, protected below {PROTECTED_BELOW_US})"


def probe_plp(folder: Path, io: DiskIO, clock: Callable[[], float] = time.perf_counter) -> PlpProbe:
    """Measure in `folder` with a file that is removed again. Raises no error: what can't be measured is unknown."""
    path = folder / _PROBE_NAME
    kind = filesystem_type(folder)
    try:
        return PlpProbe(folder, kind, _median_us(path, io, clock))
    except OSError as error:
        return PlpProbe(folder, kind, None, f"O_DIRECT: errno {error.errno}: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):
            io.unlink(path)


def require_plp(probe: PlpProbe) -> None:
    """Raises ConfigError for a disk that is not known to be protected."""
    if not probe.protected:
        raise ConfigError(
            f"require_plp: the disk of {probe.folder} has {probe}; use another disk, or leave require_plp out: "
            f"what a power cut destroys is then found at the next read and computed anew"
        )


def filesystem_type(path: Path) -> str:
    """The type of the filesystem that holds `path`, "" if unknown."""
    try:
        device = path.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return ""


def _median_us(path: Path, io: DiskIO, clock: Callable[[], float]) -> float:
    fd = io.open(path, create=True, direct=True)
    try:
        block = aligned_buffer(PAGE)
        block[:] = b"\xa5" * PAGE
        took = []
        for _ in range(_ROUNDS):
            start = clock()
            io.pwritev(fd, [block], 0)
            io.fdatasync(fd)
            took.append(clock() - start)
        return statistics.median(took[1:]) * 1e6  # the first one also makes the file
    finally:
        io.close(fd)
