"""Slots in slab files: whole transfers with O_DIRECT, or buffered where the filesystem has none.

A rank has one slab file, for a while several after a restart with another cp_size; `Slab` joins them to one row of
slots. Transfers of different slots may run in any number of threads at once.
"""

import errno
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from benthic.common.show import clip
from benthic.common.units import MIB
from benthic.tiers.disk.format import PAGE, FrameGeometry
from benthic.tiers.disk.io import Buffer, DiskIO

logger = logging.getLogger(__name__)

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ZEROS = MIB


def aligned_buffer(num_bytes: int) -> memoryview:
    """Fresh zeroed memory, 4 KiB aligned, as O_DIRECT needs it; freed with its last view."""
    return memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]


def reserve_file(
    path: Path, size: int, io: DiskIO, progress: Callable[[int], None] = lambda done: None, step: int = 1 << 30
) -> None:
    """Make the file exactly `size` bytes long with its blocks reserved, `progress` hearing of the bytes reached.

    A new file's name is durable too. Without preallocation zeros are written behind the old end, which is said once.
    Raises OSError.
    """
    is_new = not path.exists()
    if not is_new and path.stat().st_size == size and path.stat().st_blocks * 512 >= size:
        progress(size)
        return
    fd = io.open(path, create=True)  # buffered: the C library may emulate the call by small writes
    try:
        start = io.size(fd)
        if start > size:
            io.truncate(fd, size)
        can_reserve = True
        for begin in range(0, size, step):
            length = min(step, size - begin)
            if can_reserve:
                can_reserve = _try_preallocate(fd, path, begin, length, io)
            if not can_reserve:
                _write_zeros(fd, max(begin, start), begin + length, io)
            progress(begin + length)
        io.fdatasync(fd)
    finally:
        io.close(fd)
    if is_new:
        io.fsync_folder(path.parent)


def _try_preallocate(fd: int, path: Path, begin: int, length: int, io: DiskIO) -> bool:
    try:
        io.preallocate(fd, begin, length)
    except OSError as error:
        if error.errno not in _NO_PREALLOCATION:
            raise
        logger.warning(
            "%s: the filesystem can't preallocate (errno %s: %s); writing zeros instead, which takes as long as "
            "writing the file once",
            path,
            error.errno,
            error.strerror,
        )
        return False
    return True


def _write_zeros(fd: int, begin: int, end: int, io: DiskIO) -> None:
    zeros = bytes(_ZEROS)
    while begin < end:
        begin += io.pwritev(fd, [memoryview(zeros)[: min(_ZEROS, end - begin)]], begin)


class SlabFile:
    """One file of slots, which exists and has its size. Descriptors are opened at construction."""

    def __init__(self, path: Path, num_slots: int, geometry: FrameGeometry, io: DiskIO, *, read_only: bool = False):
        self.path = path
        self.num_slots = num_slots
        self.geometry = geometry
        self.direct = True
        self._io = io
        self._read_only = read_only
        self._switching = threading.Lock()
        self._syncing = threading.Lock()  # a second sync waits for the first, which may be the one that covers it
        self._unsynced = False
        self._fds: list[int] = []
        self._fd = self._open_first()

    def write(self, slot: int, header_block: Buffer, frame: Buffer) -> None:
        """Write header and frame, 4 KiB aligned, to the slot. Raises OSError; durable only after `sync`."""
        self._transfer(self._io.pwritev, slot, (header_block, frame))
        self._unsynced = True

    def read(self, slot: int, header_block: Buffer, frame: Buffer) -> None:
        """Read the slot into both buffers. Raises OSError, EIO where the file ends too early."""
        self._transfer(self._io.preadv, slot, (header_block, frame))

    def read_header(self, slot: int, block: Buffer) -> None:
        """Read the slot's header block into `block`, 4096 aligned bytes. Raises OSError."""
        self._transfer(self._io.preadv, slot, (block,))

    def sync(self) -> None:
        """Make durable what was written before the call; nothing to do where nothing was."""
        with self._syncing:
            if not self._unsynced:
                return
            self._unsynced = False
            try:
                self._io.fdatasync(self._fd)
            except OSError as error:
                self._unsynced = True
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the descriptors; no transfer may be running."""
        while self._fds:
            self._io.close(self._fds.pop())

    def _open_first(self) -> int:
        try:
            fd = self._open(direct=True)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            return self._go_buffered(error)
        if self.num_slots:
            self._fd = fd
            try:
                self.read_header(0, aligned_buffer(PAGE))  # some filesystems refuse only the transfer: learn it now
            except OSError as error:
                if error.errno != errno.EIO:  # a bad slot is a miss like any other
                    raise
            return self._fd
        return fd

    def _open(self, *, direct: bool) -> int:
        fd = self._io.open(self.path, direct=direct, read_only=self._read_only)
        self._fds.append(fd)
        return fd

    def _go_buffered(self, error: OSError) -> int:
        """Open without O_DIRECT, once; the old descriptor stays open for transfers that are under way."""
        with self._switching:
            if self.direct:
                self._fd = self._open(direct=False)
                self.direct = False
                logger.warning(
                    "%s: O_DIRECT refused (errno %s: %s); using buffered transfers and fdatasync, which cost page "
                    "cache and some speed",
                    self.path,
                    error.errno,
                    error.strerror,
                )
        return self._fd

    def _transfer(
        self, call: Callable[[int, Sequence[Buffer], int], int], slot: int, buffers: tuple[Buffer, ...]
    ) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"{self.path}: slot {slot} does not exist; the file has slots 0 … {self.num_slots - 1}")
        offset = slot * self.geometry.slot_bytes
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            direct = self.direct
            try:
                moved = call(self._fd, left, offset)
            except OSError as error:
                if not direct or error.errno not in _NO_DIRECT:
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                self._go_buffered(error)
                continue
            if moved <= 0:
                raise OSError(errno.EIO, f"the file ends inside slot {slot}", str(self.path))
            offset += moved
            left = _behind(left, moved)


def _behind(buffers: Sequence[memoryview], moved: int) -> list[memoryview]:
    """What is left of the buffers after their first `moved` bytes."""
    left = []
    for buffer in buffers:
        taken = min(moved, len(buffer))
        moved -= taken
        if taken < len(buffer):
            left.append(buffer[taken:])
    return left


class Slab:
    """One rank's slots: slab files side by side, the first file's slots first."""

    def __init__(self, files: Sequence[SlabFile]) -> None:
        self.files = tuple(files)
        self._single = files[0] if len(files) == 1 else None
        self.num_slots = sum(file.num_slots for file in files)
        self.geometry = files[0].geometry

    @property
    def path(self) -> Path:
        """The first file, which is the rank's own."""
        return self.files[0].path

    @property
    def direct(self) -> bool:
        """Whether every file takes O_DIRECT, as far as known by now."""
        return all(file.direct for file in self.files)

    @property
    def slot_bytes(self) -> int:
        return self.geometry.slot_bytes

    def locate(self, slot: int) -> tuple[SlabFile, int]:
        """The file that holds the slot, and the slot's number there. Raises ValueError."""
        if self._single is not None:
            return self._single, slot
        local = slot
        for file in self.files:
            if 0 <= local < file.num_slots:
                return file, local
            local -= file.num_slots
        raise ValueError(f"slot {clip(slot)} does not exist; the slab has slots 0 … {self.num_slots - 1}")

    def number_of(self, slot: int) -> int:
        """Which of the files holds the slot."""
        return self.files.index(self.locate(slot)[0])

    def write(self, slot: int, header_block: Buffer, frame: Buffer) -> None:
        """As `SlabFile.write`."""
        file, local = self.locate(slot)
        file.write(local, header_block, frame)

    def read(self, slot: int, header_block: Buffer, frame: Buffer) -> None:
        """As `SlabFile.read`."""
        file, local = self.locate(slot)
        file.read(local, header_block, frame)

    def read_header(self, slot: int, block: Buffer) -> None:
        """As `SlabFile.read_header`."""
        file, local = self.locate(slot)
        file.read_header(local, block)

    def sync(self) -> None:
        """Make durable what was written to any file before the call. Raises OSError."""
        for file in self.files:
            file.sync()

    def close(self) -> None:
        """Close every file; no transfer may be running."""
        for file in self.files:
            file.close()
