"""What the filesystem refused, as one paragraph for the user: the path, the system's words, and the way out."""

import errno
import os
import pwd
from pathlib import Path

from benthic.common.errors import BenthicError, CapacityError, ConfigError


def refusal(doing: str, path: Path, error: OSError) -> BenthicError:
    """The error to raise when `doing` (a verb phrase, e.g. "make the cache folder") failed on `path`."""
    number = error.errno or 0
    text = f"can't {doing} {path}: errno {number}: {os.strerror(number) if number else error}"
    remedy = _remedy(number, path)
    kind = CapacityError if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ConfigError
    return kind(f"{text}; {remedy}")


def _remedy(number: int, path: Path) -> str:
    existing = next((p for p in (path, *path.parents) if os.path.lexists(p)), Path("/"))
    if number in (errno.ENOTDIR, errno.EEXIST):
        return f"{existing} is not a folder; name another --l3-dir, or move it away"
    if number == errno.ENOENT:
        return f"there is nothing below {existing} by that name; check the path"
    if number in (errno.EACCES, errno.EPERM):
        return (
            f"{existing} belongs to {_owner(existing)} (mode {existing.stat().st_mode & 0o7777:04o}) and this process "
            f"runs as {_name(os.geteuid())}; change its owner or mode, or name another --l3-dir"
        )
    if number == errno.EROFS:
        return "the filesystem is mounted read-only; mount it for writing, or name another --l3-dir"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "the disk or the quota is full; free some room, or lower --l3-size"
    if number == errno.EFBIG:
        return "the filesystem doesn't take files of that size; lower --l3-size, or spread it with --l3-config"
    return "see the system's log for the disk's state, or name another --l3-dir"


def _owner(path: Path) -> str:
    return _name(path.stat().st_uid)


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
