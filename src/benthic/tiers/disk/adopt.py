"""Take an index along when its place in the configuration changes (`index_dir`)."""

import logging
from pathlib import Path

from benthic.common.units import MIB
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.disk.recovery import remove_index

logger = logging.getLogger(__name__)


def adopt_index(old: Path, new: Path, io: DiskIO) -> None:
    """Move an index to its new place, on another filesystem too: whole and durable there before it goes here.

    Nothing to do where it's not at the old place (any more). Raises OSError.
    """
    if old == new or not old.exists():
        return
    remove_index(new, io)  # of an earlier time: the manifest says that the old place is the one in use
    temporary = new.with_name(new.name + ".new")
    _copy(old, temporary, io)
    io.rename(temporary, new)
    io.fsync_folder(new.parent)
    remove_index(old, io)
    logger.info("%s: index moved to %s", old, new)


def _copy(source: Path, target: Path, io: DiskIO) -> None:
    reading = io.open(source, read_only=True)
    try:
        writing = io.open(target, create=True)
        try:
            io.truncate(writing, 0)
            buffer = bytearray(MIB)
            done = 0
            while got := io.preadv(reading, [buffer], done):
                written = 0
                while written < got:
                    written += io.pwritev(writing, [memoryview(buffer)[written:got]], done + written)
                done += got
            io.fdatasync(writing)
        finally:
            io.close(writing)
    finally:
        io.close(reading)
