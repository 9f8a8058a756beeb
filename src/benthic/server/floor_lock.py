"""The disk floor's folders, locked and usable, before anything is loaded. No torch here: a second server must learn
within a second or two that it can't start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from benthic.common.errors import ConfigError
from benthic.config import DiskConfig
from benthic.tiers.disk.lock import lock_folders


@contextmanager
def floor_locked(disk: DiskConfig | None) -> Iterator[tuple[int, ...]]:
    """Hold every folder of the floor; gives the locks' descriptors, for the engine to inherit. None: nothing to lock.

    Raises ConfigError that names who holds a folder, or why it can't be used.
    """
    if disk is None:
        yield ()
        return
    lock = lock_folders(disk.folders, "benthic serve")
    try:
        for folder in disk.folders:
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise ConfigError(
                    f"the cache folder {folder} is not writable for this user; change its owner or mode, "
                    f"or name another folder (--l3-dir)"
                )
        yield lock.fds
    finally:
        lock.release()
