"""What one process does before any rank opens its files: folders, manifest, room, sizes.

The folders' locks are held by the caller (`lock_folders`). A kill at any point leaves a folder that the next start
takes on from there.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benthic.config.disk import DiskConfig
from benthic.tiers.disk.adopt import adopt_index
from benthic.tiers.disk.format import FrameGeometry
from benthic.tiers.disk.index import IndexDamaged, read_entries
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.disk.layout import (
    FilePlan,
    check_room,
    existing_slabs,
    index_path,
    make_folders,
    namespace_folder,
    other_namespaces,
    plan_files,
)
from benthic.tiers.disk.manifest import Manifest, check_manifest, read_manifest, remove_temporary, write_manifest
from benthic.tiers.disk.plp import PlpProbe, probe_plp, require_plp
from benthic.tiers.disk.recovery import remove_index
from benthic.tiers.disk.refusal import refusal
from benthic.tiers.disk.restripe import Progress, RestripeReport, needs_restripe, restripe
from benthic.tiers.disk.slab import reserve_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_floor` found and did."""

    files: tuple[FilePlan, ...]
    restriped: RestripeReport
    plp: tuple[PlpProbe, ...]  # a disk each
    others: tuple[tuple[Path, str, int], ...]  # other namespaces: disk, name, bytes


def prepare_floor(
    config: DiskConfig,
    *,
    namespace: bytes,
    words: dict[str, str],
    geometry: FrameGeometry,
    num_ranks: int,
    io: DiskIO,
    progress: Progress,
) -> Prepared:
    """Bring the namespace's files on all disks to what `config` asks for, for `num_ranks` ranks.

    Applies the cold start policy, moves pages where sizes have changed, reserves the blocks, writes the manifest last.
    Raises ConfigError and CapacityError with the way out.
    """
    folders = make_folders(config, namespace, io)
    try:
        current = _check_manifests(config, namespace, words, geometry, io)
        probes = tuple(probe_plp(namespace_folder(disk.path, namespace), io) for disk in config.disks)
        if config.require_plp:
            for probe in probes:
                require_plp(probe)
        if config.cold_start == "clear":
            _clear(config, namespace, io)
        _remove_drained(config, namespace, num_ranks, io)
        files = plan_files(config, namespace, geometry, num_ranks)
        check_room(config, namespace, files, io)
        report = RestripeReport()
        if needs_restripe(files, geometry):
            report = restripe(files, geometry, num_ranks, io, progress)
        _reserve(files, geometry, io, progress)
        for folder in folders:
            io.fsync_folder(folder)
            io.fsync_folder(folder.parent)
        for disk in config.disks:
            folder = namespace_folder(disk.path, namespace)
            if read_manifest(folder) != current:
                write_manifest(folder, current, io)
        others = tuple((d.path, name, size) for d in config.disks for name, size in other_namespaces(d.path, namespace))
    except OSError as error:
        raise refusal("prepare the cache folder", _path_of(error, folders[0]), error) from error
    return Prepared(files, report, probes, others)


def _path_of(error: OSError, folder: Path) -> Path:
    return Path(str(error.filename)) if error.filename else folder


def _check_manifests(
    config: DiskConfig, namespace: bytes, words: dict[str, str], geometry: FrameGeometry, io: DiskIO
) -> Manifest:
    """The manifest as it is to be; what the folders' own say of another place for the indexes is carried out."""
    wanted = Manifest(namespace=namespace.hex(), geometry=geometry, words=words, index_dir=config.index_dir)
    for number, disk in enumerate(config.disks):
        folder = namespace_folder(disk.path, namespace)
        remove_temporary(folder, io)
        found = read_manifest(folder)
        slabs = existing_slabs(folder)
        if found is None:
            for k in slabs:  # the first start did not end: nothing can have been stored, whatever lies there
                remove_index(index_path(config, namespace, number, k), io)
            continue
        check_manifest(folder, found, wanted)
        if found.index_dir != config.index_dir:
            before = replace(config, index_dir=found.index_dir)
            for k in slabs:
                adopt_index(index_path(before, namespace, number, k), index_path(config, namespace, number, k), io)
    return wanted


def _each_slab(config: DiskConfig, namespace: bytes) -> list[tuple[int, Path, Path]]:
    """Number, slab and index of every file that exists."""
    return [
        (k, slab, index_path(config, namespace, number, k))
        for number, disk in enumerate(config.disks)
        for k, slab in existing_slabs(namespace_folder(disk.path, namespace)).items()
    ]


def _clear(config: DiskConfig, namespace: bytes, io: DiskIO) -> None:
    """Empty every index and let it be durable; the slabs stay until they are overwritten."""
    for _, _, path in _each_slab(config, namespace):
        if path.exists():
            remove_index(path, io)
            io.fsync_folder(path.parent)


def _remove_drained(config: DiskConfig, namespace: bytes, num_ranks: int, io: DiskIO) -> None:
    """Remove files beyond the ranks' own that hold no page any more; their budget goes to the others."""
    for k, slab, index in _each_slab(config, namespace):
        if k >= num_ranks and _is_empty(index):
            remove_index(index, io)
            io.unlink(slab)
            logger.info("%s: nothing left in it, removed", slab)


def _is_empty(index: Path) -> bool:
    if not index.exists() or not index.stat().st_size:
        return True
    with contextlib.suppress(IndexDamaged):
        return not read_entries(index, live=False)
    return True


def _reserve(files: Sequence[FilePlan], geometry: FrameGeometry, io: DiskIO, progress: Progress) -> None:
    """Give every slab its planned size, with blocks behind every byte of it."""
    total = sum(plan.num_slots for plan in files) * geometry.slot_bytes
    before = 0
    for plan in files:
        size = plan.num_slots * geometry.slot_bytes
        reserve_file(plan.slab, size, io, _reporter(progress, before, total))
        before += size


def _reporter(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        progress("reserving", before + done, total)

    return report
