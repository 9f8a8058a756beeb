"""Look at a cache folder from outside: which namespaces it holds, how large, and whether every page in them is whole.

Nothing here changes a file, so it works on a read-only mount.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benthic.common.errors import ConfigError
from benthic.tiers.disk.format import PAGE, FrameGeometry, Verdict, check
from benthic.tiers.disk.index import Entry, IndexDamaged, read_entries
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.disk.layout import existing_slabs, is_own_file, own_bytes
from benthic.tiers.disk.lock import LOCK_NAME
from benthic.tiers.disk.manifest import Manifest, ManifestDamaged, is_namespace, read_manifest
from benthic.tiers.disk.refusal import refusal
from benthic.tiers.disk.slab import SlabFile, aligned_buffer


@dataclass(frozen=True, slots=True)
class NamespaceSurvey:
    """One namespace's folder. Where the manifest is missing or damaged, `problem` says so and `manifest` is None."""

    folder: Path
    manifest: Manifest | None
    num_bytes: int  # on the disk, the index included where it lies in the folder
    num_slabs: int
    problem: str = ""
    damaged: bool = False  # the problem is more than a first start that did not finish

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True, slots=True)
class SlabSurvey:
    """One slab file with its index."""

    path: Path
    index: Path
    num_slots: int
    num_pages: int  # entries in the index
    ages: tuple[int, int] | None  # least and greatest
    problem: str = ""  # why the index can't be read


@dataclass(frozen=True, slots=True)
class Damage:
    """A page that the index promises and the slab doesn't hold, or an index that can't be read (slot -1)."""

    path: Path
    slot: int
    content_hash: bytes
    kind: str


def namespaces(folder: Path) -> list[NamespaceSurvey]:
    """The namespaces in a cache folder, in order of name. Raises ConfigError if it's no cache folder."""
    try:
        names = sorted(os.listdir(folder))
        found = [survey(folder / name) for name in names if is_namespace(name) and (folder / name).is_dir()]
    except OSError as error:
        raise refusal("read the cache folder", folder, error) from None
    if not found and LOCK_NAME not in names:
        raise ConfigError(
            f"{folder} is not a cache folder: it holds neither a lock file nor a namespace; "
            f"name the folder that `benthic serve --l3-dir` was given"
        )
    return found


def choose(found: list[NamespaceSurvey], prefix: str | None, folder: Path) -> list[NamespaceSurvey]:
    """Those whose name begins with `prefix`, all of them for None. Raises ConfigError if it fits none or several."""
    if prefix is None:
        return found
    fitting = [one for one in found if one.name.startswith(prefix.lower())]
    if len(fitting) != 1 or not prefix:
        have = ", ".join(one.name[:12] for one in found) or "none"
        count = "no namespace" if not fitting else f"{len(fitting)} namespaces"
        raise ConfigError(f"--namespace {prefix!r} fits {count} in {folder}; there are: {have}")
    return fitting


def index_folders(found: list[NamespaceSurvey]) -> list[Path]:
    """Folders of their own that indexes of these namespaces lie in, as far as they exist."""
    named = {one.manifest.index_dir for one in found if one.manifest is not None}
    return sorted(path for path in named if path is not None and path.is_dir())


def survey(folder: Path) -> NamespaceSurvey:
    """What a namespace's folder holds. Raises OSError."""
    manifest, problem, damaged = None, "", False
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            problem = "no manifest: its first start did not finish"
        elif manifest.namespace != folder.name:
            problem, damaged = f"its manifest is of another namespace, {manifest.namespace[:12]}…", True
    except ManifestDamaged as error:
        problem, damaged = str(error), True
    return NamespaceSurvey(folder, manifest, own_bytes(folder), len(existing_slabs(folder)), problem, damaged)


def survey_slabs(found: NamespaceSurvey, *, live: bool) -> list[SlabSurvey]:
    """The slabs of a namespace with a manifest; `live`: a server has them open. Raises OSError."""
    if found.manifest is None:
        return []
    slabs = []
    for number, path in sorted(existing_slabs(found.folder).items()):
        index = _index_of(found, number)
        num_slots = path.stat().st_size // found.manifest.geometry.slot_bytes
        try:
            entries = _entries(index, live)
        except IndexDamaged as error:
            slabs.append(SlabSurvey(path, index, num_slots, 0, None, str(error)))
            continue
        ages = [entry.age for _, entry in entries if entry is not None]
        slabs.append(SlabSurvey(path, index, num_slots, len(entries), (min(ages), max(ages)) if ages else None))
    return slabs


def verify(found: NamespaceSurvey, io: DiskIO, progress: Callable[[int, int], None]) -> Iterator[Damage]:
    """Read every page that the indexes of a stopped namespace name, and yield what is damaged.

    `progress` hears pages done and pages in all. An entry past the end of its file, and a second owner of one slot, are
    damage too, although a start mends them. Raises OSError for a folder that can't be read at all.
    """
    if found.manifest is None:
        return
    geometry = found.manifest.geometry
    work: list[tuple[Path, list[tuple[bytes, Entry | None]]]] = []
    for number, slab in sorted(existing_slabs(found.folder).items()):
        index = _index_of(found, number)
        try:
            work.append((slab, _entries(index, live=False)))
        except IndexDamaged as error:
            yield Damage(index, -1, b"", f"index: {error}")
    total = sum(len(entries) for _, entries in work)
    done = 0
    for slab, entries in work:
        for damage in _verify_slab(slab, entries, geometry, io):
            if damage is not None:
                yield damage
            done += 1
            progress(done, total)


def _verify_slab(
    path: Path, entries: list[tuple[bytes, Entry | None]], geometry: FrameGeometry, io: DiskIO
) -> Iterator[Damage | None]:
    num_slots = path.stat().st_size // geometry.slot_bytes
    owners = Counter(entry.slot for _, entry in entries if entry is not None)
    buffer = aligned_buffer(geometry.slot_bytes)
    header, frame = buffer[:PAGE], buffer[PAGE:]
    file = SlabFile(path, num_slots, geometry, io, read_only=True)
    try:
        for key, entry in sorted(entries, key=lambda stored: -1 if stored[1] is None else stored[1].slot):
            if entry is None:
                yield Damage(path, -1, key, "damaged index entry")
            elif entry.slot >= num_slots:
                yield Damage(path, entry.slot, key, f"past the end of the file, which has {num_slots} slots")
            elif owners[entry.slot] > 1:
                yield Damage(path, entry.slot, key, f"slot with {owners[entry.slot]} owners")
            else:
                yield _verify_page(file, key, entry.slot, header, frame)
    finally:
        file.close()


def _verify_page(file: SlabFile, key: bytes, slot: int, header: memoryview, frame: memoryview) -> Damage | None:
    try:
        file.read(slot, header, frame)
    except OSError as error:
        return Damage(file.path, slot, key, f"I/O error: errno {error.errno}: {error.strerror}")
    verdict = check(header, key, frame, file.geometry)
    return None if verdict is Verdict.OK else Damage(file.path, slot, key, verdict.value)


def remove_namespace(found: NamespaceSurvey, io: DiskIO) -> list[str]:
    """Remove a namespace's files, the indexes first, so that a kill leaves nothing that lives. Raises OSError.

    Returns the names of files that are not the floor's own; they and the folder stay.
    """
    indexes = [found.folder]
    if found.manifest is not None and found.manifest.index_dir is not None:
        indexes.insert(0, found.manifest.index_dir / found.name)
    for folder in indexes:
        if folder.is_dir():
            names = sorted(filter(is_own_file, os.listdir(folder)), key=lambda name: not name.startswith("index-"))
            for name in names:
                io.unlink(folder / name)
            io.fsync_folder(folder)
            if not os.listdir(folder):
                folder.rmdir()
    return sorted(os.listdir(found.folder)) if found.folder.exists() else []


def _index_of(found: NamespaceSurvey, number: int) -> Path:
    manifest = found.manifest
    base = found.folder if manifest is None or manifest.index_dir is None else manifest.index_dir / found.name
    return base / f"index-{number}.lmdb"


def _entries(index: Path, live: bool) -> list[tuple[bytes, Entry | None]]:
    return read_entries(index, live=live) if index.exists() and index.stat().st_size else []
