"""What of an index's entries is alive: each slot gets one owner, each page one slot."""

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from benthic.tiers.disk.format import PAGE, FrameGeometry, Verdict, check, stored_hash
from benthic.tiers.disk.index import Entry, IndexDamaged, IndexFile
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.disk.slab import aligned_buffer

logger = logging.getLogger(__name__)

HeaderReader = Callable[[int], bytes | None]  # slot → the hash in its header; None: no page's header


def open_index(path: Path, map_bytes: int, io: DiskIO) -> tuple[IndexFile, str]:
    """The index, and why it was made anew if it was damaged, else "". Raises OSError."""
    try:
        return IndexFile(path, map_bytes, io), ""
    except IndexDamaged as error:
        logger.warning(
            "%s: the index is damaged (%s) and is built anew, empty: what its slab held is computed and stored again",
            path,
            error,
        )
        remove_index(path, io)
        return IndexFile(path, map_bytes, io), str(error)


def remove_index(path: Path, io: DiskIO) -> None:
    """Remove an index and LMDB's lock file, if they are there."""
    for name in (path, lock_file_of(path)):
        with contextlib.suppress(FileNotFoundError):
            io.unlink(name)


def lock_file_of(index: Path) -> Path:
    """LMDB's own lock file of an index."""
    return index.with_name(index.name + "-lock")


def header_reader(read_header: Callable[[int, memoryview], None], geometry: FrameGeometry) -> HeaderReader:
    """What `resolve` needs to settle who owns a slot; an I/O error counts as no page."""
    block = aligned_buffer(PAGE)

    def read(slot: int) -> bytes | None:
        try:
            read_header(slot, block)
        except OSError:
            return None
        return stored_hash(block) if check(block, None, None, geometry) is Verdict.OK else None

    return read


def resolve(
    stored: Iterable[tuple[bytes, Entry | None]], num_slots: int, hash_in: HeaderReader
) -> tuple[dict[bytes, Entry], list[bytes]]:
    """The live entries of one file, and the keys to be dropped from its index.

    Dropped are damaged entries, those past the file's end, and of several that name one slot all but the one whose
    hash stands in the slot's header.
    """
    live: dict[bytes, Entry] = {}
    dropped: list[bytes] = []
    owners: dict[int, bytes] = {}
    contested: dict[int, list[bytes]] = {}
    for key, entry in stored:
        if entry is None or entry.slot >= num_slots:
            dropped.append(key)
            continue
        live[key] = entry
        first = owners.setdefault(entry.slot, key)
        if first is not key:
            contested.setdefault(entry.slot, [first]).append(key)
    for slot, keys in contested.items():
        found = hash_in(slot)
        losers = [key for key in keys if key != found]
        dropped.extend(losers)
        for key in losers:
            del live[key]
    return live, dropped
