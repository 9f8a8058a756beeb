"""When a disk stops taking writes: after several errors in a row, until it is repaired or has room again.

Reads go on, since what is on the disk is verified whenever it is read. A full disk is tried again by itself; anything
else waits for a restart, because a disk that fails writes also loses what it has acknowledged.
"""

import errno
import os
from dataclasses import dataclass

ERRORS_IN_A_ROW = 8
TRY_AGAIN_S = 60.0
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT))
_NOT_THE_SLOT = _NO_ROOM | {errno.EROFS, errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOMEM}


def spoils_slot(error: OSError) -> bool:
    """Whether this error speaks against the slot it was met in, and not against the disk as a whole."""
    return error.errno not in _NOT_THE_SLOT


def errno_name(error: OSError) -> str:
    """`ENOSPC` and the like; the message where the error has no number."""
    if error.errno is None:
        return str(error)
    return f"{errno.errorcode.get(error.errno, error.errno)} ({os.strerror(error.errno)})"


@dataclass
class Service:
    """Whether the disk takes writes. Changed by the keeper's thread alone; `reason` may be read from any."""

    path: str
    reason: str = ""  # "" while in service
    _in_a_row: int = 0
    _try_again_at: float | None = None

    def admits(self, now_s: float) -> bool:
        """Whether a spill may be written now; out of service for want of room, one is let through a minute."""
        if not self.reason:
            return True
        if self._try_again_at is None or now_s < self._try_again_at:
            return False
        self._try_again_at = now_s + TRY_AGAIN_S
        return True

    def note_success(self) -> None:
        """A group is durable: the disk works, and is back in service where it was out for want of room."""
        self._in_a_row = 0
        if self._try_again_at is not None:
            self.reason, self._try_again_at = "", None

    def note_error(self, error: OSError, now_s: float) -> None:
        """A write, a sync or an index commit has failed."""
        self._in_a_row += 1
        if self._in_a_row < ERRORS_IN_A_ROW or self.reason:
            return
        what = f"{self.path}: {self._in_a_row} write errors in a row, the last {errno_name(error)}"
        if error.errno in _NO_ROOM:
            self._try_again_at = now_s + TRY_AGAIN_S
            self.reason = (
                f"{what}; make room on the disk: one write is tried every {TRY_AGAIN_S:.0f} s, "
                "and the first that succeeds brings the disk back"
            )
        else:
            self.reason = f"{what}; reads go on; repair or replace the disk, then restart the server"

    def take_out(self, why: str) -> None:
        """Out of service for good, for a reason other than the disk's errors."""
        self.reason = f"{self.path}: {why}; reads go on where they can; restart the server"
        self._try_again_at = None
