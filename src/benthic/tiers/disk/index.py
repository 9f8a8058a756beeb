"""The durable map of a rank's pages, content hash → slot, position, age: one LMDB file beside each slab file.

Key: the 32 bytes of the content hash. Value, 20 bytes, little endian:

    byte 0  4   slot in the slab file of the same number
         4  4   position: the page's index in its sequence, which says who owns it
         8  8   age: the number of the last admission that used the page
        16  4   xxh32 of key and bytes 0 … 15

A transaction is durable when `apply` returns: LMDB syncs its pages, then writes and syncs the meta page that makes
them count. LMDB keeps no checksums of its own, and a damaged file can crash the process that maps it; so a file is
walked page by page, without mapping it, before it is opened.
"""

import errno
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb
import lmdb.verify
from xxhash import xxh32_intdigest

from benthic.common.units import KIB, format_size
from benthic.tiers.disk.format import HASH_BYTES, PAGE
from benthic.tiers.disk.io import DiskIO, IndexCommit

logger = logging.getLogger(__name__)

_FIELDS = struct.Struct("<IIQ")
_CHECK = struct.Struct("<I")
_VALUE_BYTES = _FIELDS.size + _CHECK.size
_MAX_AGE = 2**62  # beyond: not a number that any run has reached
_MAP_UNIT = 64 * KIB
_BYTES_PER_SLOT = 256  # 93 measured in a file filled at random; the rest is room for the pages that a commit copies
_FULL_BELOW = 1 << 20  # bytes free: less than one commit may want
_ERRNO_OF_TEXT = {os.strerror(number): number for number in sorted(errno.errorcode, reverse=True)}
_REASONS = {MemoryError: errno.ENOMEM, lmdb.MapFullError: errno.ENOSPC, lmdb.ReadonlyError: errno.EROFS}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a page lies, which page of its sequence it is, and the number of the last admission that used it."""

    slot: int
    position: int
    age: int


class IndexDamaged(Exception):
    """The file is no index, or one that can't be trusted."""


def map_bytes_for(num_slots: int) -> int:
    """The size of an index's map, and so the most that its file takes, for `num_slots` entries; in 64 KiB units."""
    return (-(-num_slots * _BYTES_PER_SLOT // _MAP_UNIT) + 2) * _MAP_UNIT


def pack_value(content_hash: bytes, entry: Entry) -> bytes:
    """The stored form of an entry."""
    fields = _FIELDS.pack(entry.slot, entry.position, entry.age)
    return fields + _CHECK.pack(xxh32_intdigest(content_hash + fields))


def unpack_value(content_hash: bytes, value: bytes) -> Entry | None:
    """The entry in a stored value; None if key or value is damaged."""
    if len(content_hash) != HASH_BYTES or len(value) != _VALUE_BYTES:
        return None
    fields = value[: _FIELDS.size]
    if _CHECK.unpack_from(value, _FIELDS.size)[0] != xxh32_intdigest(content_hash + fields):
        return None
    entry = Entry(*_FIELDS.unpack(fields))
    return entry if entry.age < _MAX_AGE else None


def inspect_file(path: Path) -> None:
    """Walk an index file without mapping it; raises IndexDamaged with the first finding."""
    try:
        problems = lmdb.verify.verify(str(path), subdir=False)  # type: ignore[no-untyped-call]  # it has no types
    except (lmdb.verify.VerifyError, struct.error, IndexError) as error:
        raise IndexDamaged(str(error)) from error
    if problems:
        raise IndexDamaged(f"{problems[0]} ({len(problems)} finding{'s' if len(problems) > 1 else ''})")


def read_entries(path: Path, *, live: bool) -> list[tuple[bytes, Entry | None]]:
    """Read a whole index file, None standing for a damaged value. Opens it read-only and closes it again.

    `live`: a writer may have it open, so LMDB's reader table is used; otherwise nothing is created or locked, and the
    file is inspected first. Raises IndexDamaged, OSError.
    """
    if not live:
        inspect_file(path)
    try:
        with (
            lmdb.open(str(path), subdir=False, readonly=True, create=False, lock=live, map_size=_map_size(path)) as env,
            env.begin() as txn,
        ):
            return [(key, unpack_value(key, value)) for key, value in txn.cursor()]
    except lmdb.Error as error:
        raise _translated(error, path) from error


class IndexFile:
    """One LMDB file. Used by one thread at a time; opened at construction, made if missing.

    Raises IndexDamaged, OSError.
    """

    def __init__(self, path: Path, map_bytes: int, io: DiskIO) -> None:
        self.path = path
        self.map_bytes = map_bytes
        self._io = io
        is_new = not path.exists()
        if not is_new and path.stat().st_size:
            inspect_file(path)
        self._env: lmdb.Environment | None = self._open()
        if is_new:
            io.fsync_folder(path.parent)  # LMDB syncs the file, not its name

    def load(self) -> Iterator[tuple[bytes, Entry | None]]:
        """Every key with its entry, None for a damaged one."""
        try:
            with self._environment().begin() as txn:
                for key, value in txn.cursor():
                    yield key, unpack_value(key, value)
        except lmdb.Error as error:
            raise _translated(error, self.path) from error

    def num_entries(self) -> int:
        """Entries in the file."""
        return int(self._environment().stat()["entries"])

    def commit(self, commit: IndexCommit) -> None:
        """Carry out one transaction; durable when this returns. Raises OSError, and then nothing has changed.

        The map is doubled as often as the transaction needs it.
        """
        while True:
            try:
                self._commit(commit)
                return
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                self.close()  # LMDB may refuse further work after a failed sync: the next use opens it anew
                raise self._reason(error) from error

    def close(self) -> None:
        """Close the file; a later use opens it again."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _commit(self, commit: IndexCommit) -> None:
        env = self._environment()
        txn = env.begin(write=True)
        try:
            if commit.clear:
                txn.drop(env.open_db(txn=txn), delete=False)
            for key in commit.deletes:
                txn.delete(key)
            for key, value in commit.puts:
                txn.put(key, value)
            self._io.before_commit(commit)
        except BaseException:
            txn.abort()
            raise
        txn.commit()
        self._io.after_commit(commit)

    def _grow(self) -> None:
        self.map_bytes *= 2
        self._environment().set_mapsize(self.map_bytes)
        logger.warning("%s: the index was full; its map is now %s", self.path, format_size(self.map_bytes))

    def _reason(self, error: lmdb.Error) -> OSError:
        """LMDB calls a short write an I/O error; on a full filesystem that's what it is."""
        reason = _translated(error, self.path)
        if reason.errno == errno.EIO and self._io.free_bytes(self.path.parent) < _FULL_BELOW:
            return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({error})", str(self.path))
        return reason

    def _environment(self) -> lmdb.Environment:
        if self._env is None:
            self._env = self._open()
        return self._env

    def _open(self) -> lmdb.Environment:
        try:
            env = lmdb.open(str(self.path), subdir=False, map_size=self.map_bytes, mode=0o600, readahead=False)
        except lmdb.Error as error:
            raise _translated(error, self.path) from error
        env.reader_check()  # a killed process may have left its mark, which would keep old pages from being used again
        return env


class SlotIndex:
    """One rank's index: a file for each of its slab files, whose slots are counted on through the files in order.

    A hash stands in one file at most. Owned by the one thread that changes map, index and pool.
    """

    def __init__(self, files: Sequence[tuple[IndexFile, int]]) -> None:
        """`files`: each index file with the number of slots of its slab file."""
        self.files = tuple(file for file, _ in files)
        self._num_slots = tuple(num_slots for _, num_slots in files)

    @classmethod
    def open(cls, path: Path, num_slots: int, io: DiskIO, *, map_bytes: int | None = None) -> "SlotIndex":
        """An index of one file, made if missing. Raises IndexDamaged, OSError."""
        return cls([(IndexFile(path, map_bytes or map_bytes_for(num_slots), io), num_slots)])

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files[0].path

    def load(self) -> Iterator[tuple[bytes, Entry]]:
        """All entries as stored, in the order of files and hashes; damaged ones and those past the end are left out."""
        base = 0
        for file, num_slots in zip(self.files, self._num_slots, strict=True):
            for key, entry in file.load():
                if entry is not None and entry.slot < num_slots:
                    yield key, entry if base == 0 else replace(entry, slot=base + entry.slot)
            base += num_slots

    def apply(self, puts: Sequence[tuple[bytes, Entry]], deletes: Sequence[bytes]) -> None:
        """Store and drop entries; durable when this returns. Raises OSError: then the same call may be made again.

        A hash in both is stored. With one file that's one transaction. With several, entries are stored before the old
        ones of the same hash go, so that a cut in between leaves a page twice rather than lost.
        """
        if len(self.files) == 1:
            self._commit(0, [(key, pack_value(key, entry)) for key, entry in puts], deletes)
            return
        by_file: list[list[tuple[bytes, bytes]]] = [[] for _ in self.files]
        for key, entry in puts:
            number, local = self._locate(entry.slot)
            by_file[number].append((key, pack_value(key, replace(entry, slot=local))))
        for number, stored in enumerate(by_file):
            self._commit(number, stored, ())
        for number, stored in enumerate(by_file):
            own = {key for key, _ in stored}
            gone = (*deletes, *(key for key, _ in puts))
            self._commit(number, (), [key for key in gone if key not in own])

    def drop_stored(self, number: int, keys: Iterable[bytes]) -> None:
        """Drop keys, damaged ones too, from one file alone. Raises OSError."""
        self._commit(number, (), tuple(keys))

    def clear(self) -> None:
        """Drop every entry; durable when this returns. Raises OSError."""
        for file in self.files:
            file.commit(IndexCommit(file.path, (), (), clear=True))

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            file.close()

    def _locate(self, slot: int) -> tuple[int, int]:
        local = slot
        for number, num_slots in enumerate(self._num_slots):
            if local < num_slots:
                return number, local
            local -= num_slots
        raise ValueError(f"slot {slot} does not exist; the index has slots 0 … {sum(self._num_slots) - 1}")

    def _commit(self, number: int, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        if puts or deletes:
            file = self.files[number]
            file.commit(IndexCommit(file.path, tuple(puts), tuple(deletes)))


def _map_size(path: Path) -> int:
    return max(path.stat().st_size, PAGE)


def _translated(error: lmdb.Error, path: Path) -> OSError:
    """The OSError that LMDB's error stands for; its text ends in the system's own, if that was the cause."""
    for kind, number in _REASONS.items():
        if isinstance(error, kind):
            return OSError(number, str(error), str(path))
    text = str(error).rpartition(": ")[2]
    return OSError(_ERRNO_OF_TEXT.get(text, errno.EIO), str(error), str(path))
