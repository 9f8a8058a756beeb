"""Host memory and disk files that the ranks of a host share: who makes them, and in which order all take hold.

Every function is called by all ranks at the same point of the start.
"""

import json
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benthic.config import DiskConfig
from benthic.models.registry import Namespace
from benthic.parallel.launch import Ranks
from benthic.parallel.layout import ParallelLayout
from benthic.tiers.disk.floor import RankFloor, find_foreign, open_floor
from benthic.tiers.disk.format import FrameGeometry
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.host.backing import Backing
from benthic.tiers.host.slabs import HostSlabs, Segment, SlabGeometry

Progress = Callable[[str, int, int], None]  # what, done, total


def map_slabs(geometry: SlabGeometry, backing: str, ranks: Ranks) -> HostSlabs:
    """A host's slabs: made by its first rank, mapped by all of it, then unlinked. Raises CapacityError, ConfigError."""
    place = ranks.layout
    if place.world_size == 1:
        return HostSlabs.open(geometry, backing=backing)
    # where the slabs are goes over a file: rank 0 can tell all ranks alike, but hosts have slabs of their own
    token = secrets.token_hex(8) if place.leads else ""
    token = ranks.start.share(token.encode() if place.leads else None).decode()
    note = Path(tempfile.gettempdir()) / f"benthic-slabs-{token}.json"
    makes = place.local_rank == 0
    slabs = None
    try:
        if makes:
            slabs = HostSlabs.create(geometry, backing=backing)
            note.write_text(_describe(slabs.segment), encoding="utf-8")
        ranks.barrier()
        if slabs is None:
            slabs = HostSlabs.attach(geometry, _segment(note.read_text(encoding="utf-8")), rank=place.local_rank)
        ranks.barrier()
    except BaseException:
        if slabs is not None:
            slabs.close()
        raise
    finally:
        if makes:
            note.unlink(missing_ok=True)
    slabs.unlink()
    return slabs


def open_floors(
    config: DiskConfig,
    namespace: Namespace,
    geometry: FrameGeometry,
    ranks: Ranks,
    io: DiskIO,
    progress: Progress,
) -> tuple[RankFloor, bool]:
    """This rank's part of the disk floor, and whether every page on disk is in its owner's file, on every rank.

    With context parallelism the ranks share a floor, which the first one lays out before the others open theirs. With
    tensor parallelism each rank's heads have a namespace, and so a floor, of their own: they are opened in turn. Raises
    ConfigError, CapacityError.
    """
    place = ranks.layout
    config = _own_part(config, place)
    floor: RankFloor | None = None
    try:
        for turn in range(place.world_size):
            if turn == place.rank:
                floor = open_floor(
                    config,
                    namespace=namespace.digest,
                    words=namespace.words,
                    geometry=geometry,
                    rank=place.cp_rank,
                    num_ranks=place.cp_size,
                    io=io,
                    progress=progress,
                    prepare=place.leads or place.tp_size > 1,
                )
            if turn == 0 or place.tp_size > 1:
                ranks.barrier()
        assert floor is not None
        tidy = _all(ranks, not floor.report.misplaced_pages)
        if place.cp_size > 1 and not tidy:
            find_foreign(config, floor, namespace=namespace.digest, geometry=geometry, num_ranks=place.cp_size, io=io)
            tidy = _all(ranks, not floor.report.misplaced_pages and not floor.foreign)
    except BaseException:
        if floor is not None:
            floor.close()
        raise
    return floor, tidy and not floor.foreign


def _all(ranks: Ranks, holds: bool) -> bool:
    """Whether it holds on every rank; all wait for all."""
    return bool(ranks.least(int(holds)))


def _own_part(config: DiskConfig, place: ParallelLayout) -> DiskConfig:
    """With tensor parallelism the ranks' floors lie side by side in the same folders: each has a share of the room."""
    if place.tp_size == 1:
        return config
    disks = tuple(replace(disk, budget_bytes=disk.budget_bytes // place.tp_size) for disk in config.disks)
    return replace(config, disks=disks)


def _describe(segment: Segment) -> str:
    backing = segment.backing
    return json.dumps(
        {
            "kind": backing.kind,
            "folder": str(backing.folder),
            "page_bytes": backing.page_bytes,
            "paths": [str(path) for path in segment.paths],
        }
    )


def _segment(text: str) -> Segment:
    found = json.loads(text)
    backing = Backing(kind=found["kind"], folder=Path(found["folder"]), page_bytes=found["page_bytes"])
    return Segment(backing, tuple(Path(path) for path in found["paths"]))
