"""The one seam between the disk floor and the operating system: faults and traces come in by another `DiskIO`.

Every method may raise OSError. Transfers may be short, as the system's own may; the caller loops.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview | mmap.mmap


@dataclass(frozen=True, slots=True)
class IndexCommit:
    """One transaction of an index, as stored: all of it is on disk afterwards, or nothing."""

    path: Path
    puts: tuple[tuple[bytes, bytes], ...]  # key, value
    deletes: tuple[bytes, ...]  # keys
    clear: bool = False  # first drop everything


class DiskIO(Protocol):
    """What the floor asks of the system."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False) -> int:
        """A file descriptor; new files get mode 0600. `direct`: with O_DIRECT."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""

    def size(self, fd: int) -> int:
        """Bytes of the file."""

    def preallocate(self, fd: int, offset: int, size: int) -> None:
        """Reserve blocks for `size` bytes from `offset` on, and let the file reach that far (posix_fallocate)."""

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file, or let it grow by a hole."""

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write; the number of bytes written may be short."""

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Read; the number of bytes read may be short, 0 at the end of the file."""

    def fdatasync(self, fd: int) -> None:
        """Make written data durable, with the metadata needed to find it."""

    def make_folder(self, path: Path) -> None:
        """Make a folder with mode 0700, parents too; no error where it exists."""

    def fsync_folder(self, path: Path) -> None:
        """Make the folder's entries durable."""

    def rename(self, old: Path, new: Path) -> None:
        """Replace `new` by `old`."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def free_bytes(self, path: Path) -> int:
        """Bytes that an ordinary process may still use on the filesystem of `path`."""

    def before_commit(self, commit: IndexCommit) -> None:
        """Called before an index transaction is committed; raising OSError makes the commit fail."""

    def after_commit(self, commit: IndexCommit) -> None:
        """Called when an index transaction is durable."""


class SystemDisk:
    """`DiskIO` by system calls."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False) -> int:
        flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        return os.open(path, flags | (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0), 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def preallocate(self, fd: int, offset: int, size: int) -> None:
        os.posix_fallocate(fd, offset, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)  # type: ignore[arg-type]  # the callers' buffers are writable

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def make_folder(self, path: Path) -> None:
        missing = [path, *path.parents]
        for folder in reversed(missing):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)

    def fsync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def before_commit(self, commit: IndexCommit) -> None:
        pass

    def after_commit(self, commit: IndexCommit) -> None:
        pass
