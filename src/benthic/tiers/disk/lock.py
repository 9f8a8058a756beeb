"""One server a cache folder: an `flock` on DIR/lock, held for life, for all namespaces in the folder.

The lock belongs to the open file, so it holds through every path that leads to the folder (symlinks, bind mounts), it
goes with the last process that has the file open, and nothing has to be removed by hand after a kill. A child that
inherits the descriptors (`subprocess.Popen(pass_fds=lock.fds)`) holds it on by itself. Loads no torch: the server
process takes the lock before the engine starts.

The file's content names the holder, a line each: pid, host, start, what it is, and the process's start in clock ticks
after boot. It serves messages, and tells whether it is worth waiting for a killed holder's child.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benthic.common.errors import ConfigError
from benthic.tiers.disk.manifest import is_namespace
from benthic.tiers.disk.refusal import refusal

LOCK_NAME = "lock"
_DYING_S = 10.0  # how long a killed server's engine may take to notice and to end
_POLL_S = 0.05


class FolderBusy(ConfigError):
    """Another process holds a cache folder."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who wrote the lock file last."""

    pid: int
    host: str
    started: str  # local time, for people
    what: str
    birth: int  # the process's start, in the kernel's clock ticks after boot: tells it from a later one with its pid

    def is_gone(self) -> bool:
        """Whether the process has certainly ended: it ran on this host and its pid is free or taken by another."""
        return self.host == socket.gethostname() and _birth(self.pid) != self.birth

    def __str__(self) -> str:
        return f"{self.what}, process {self.pid} on {self.host}, started {self.started}"


class FolderLock:
    """Locks on one or more cache folders, until `release` or the end of every process that has the descriptors."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)

    def release(self) -> None:
        """Close the descriptors. A child that inherited them holds the lock on. Idempotent."""
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)


def lock_folders(
    paths: Sequence[Path],
    who: str,
    *,
    make: bool = True,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> FolderLock:
    """Lock the cache folders `paths` for `who` (e.g. "benthic serve"), in path order; made with mode 0700 if missing.

    Where the holder was killed, waits a while for its last child to end. `make` False: only folders that exist.
    Raises FolderBusy that names the holder, and ConfigError for a folder that can't be used.
    """
    with ExitStack() as stack:
        fds = []
        for folder in sorted({path.resolve() for path in paths}):
            fd = _open(folder, make)
            stack.callback(os.close, fd)
            _wait_for(fd, folder, sleep, clock)
            _check_usable(folder)
            _sign(fd, who)
            fds.append(fd)
        stack.pop_all()
    return FolderLock(fds)


def holder_of(folder: Path) -> Holder | None:
    """Who holds the folder now, None if nobody does or nobody can tell. Changes nothing. Raises ConfigError."""
    path = folder / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refusal("read", path, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(fd) or Holder(0, "this host", "at an unknown time", "another process", 0)
    finally:
        os.close(fd)
    return None


def lock_for_reading(folder: Path) -> FolderLock:
    """Keep writers out of a folder while it is read; changes nothing, so it works on a read-only mount.

    Raises FolderBusy that names the holder, ConfigError. Without a lock file there is nothing to hold: `fds` is empty.
    """
    path = folder / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return FolderLock(())
    except OSError as error:
        raise refusal("read", path, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        busy = _busy(folder, _read(fd))
        os.close(fd)
        raise busy from None
    return FolderLock((fd,))


def _open(folder: Path, make: bool) -> int:
    path = folder / LOCK_NAME
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise refusal("use as a cache folder", folder, error) from None
    except OSError as error:
        raise refusal("make or open the cache folder's lock", path, error) from None


def _check_usable(folder: Path) -> None:
    """Refuse now what would fail when the model is loaded: a folder or a left-over file that can't be written."""
    unusable = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise refusal("use the cache folder", folder, unusable)
    for namespace in filter(Path.is_dir, folder.iterdir()):
        if is_namespace(namespace.name):
            if not os.access(namespace, os.R_OK | os.W_OK | os.X_OK):
                raise refusal("use the left-over folder", namespace, unusable)
            for file in namespace.iterdir():
                if not os.access(file, os.R_OK | os.W_OK):
                    raise refusal("use the left-over file", file, unusable)


def _wait_for(fd: int, folder: Path, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
    until = clock() + _DYING_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _read(fd)
            if holder is None or not holder.is_gone() or clock() >= until:
                raise _busy(folder, holder) from None
        except OSError as error:
            raise refusal("lock", folder / LOCK_NAME, error) from None
        sleep(_POLL_S)


def _busy(folder: Path, holder: Holder | None) -> FolderBusy:
    who = "another process" if holder is None else str(holder)
    rest = " (it has ended, but a child of it still runs)" if holder is not None and holder.is_gone() else ""
    return FolderBusy(
        f"the cache folder {folder} is in use by {who}{rest}; stop that one first, or name another folder (--l3-dir)"
    )


def _sign(fd: int, who: str) -> None:
    pid = os.getpid()
    lines = (str(pid), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"), who, str(_birth(pid)))
    os.ftruncate(fd, 0)
    os.pwrite(fd, "".join(f"{line}\n" for line in lines).encode(), 0)


def _read(fd: int) -> Holder | None:
    """The holder that the file names; None while it signs."""
    lines = os.pread(fd, 4096, 0).decode("utf-8", "replace").splitlines()
    if len(lines) != 5 or not lines[0].isdigit() or not lines[4].isdigit():
        return None
    return Holder(int(lines[0]), lines[1], lines[2], lines[3], int(lines[4]))


def _birth(pid: int) -> int:
    """When the process began, in clock ticks after boot (field 22 of /proc/PID/stat); 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # the name in front stands in parentheses and may hold some itself
    return 0 if fields[0] == "Z" else int(fields[19])
