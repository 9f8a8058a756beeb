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
    slabs = HostSlabs.create(geometry, backing=backing) if place.local_rank == 0 else None
    try:
        told = _tell_host(None if slabs is None else _describe(slabs.segment), ranks)
        if slabs is None:
            slabs = HostSlabs.attach(geometry, _segment(told), rank=place.local_rank)
        ranks.barrier()
    except BaseException:
        if slabs is not None:
            slabs.close()
        raise
    slabs.unlink()
    return slabs


def _tell_host(text: str | None, ranks: Ranks) -> str:
    """What the first rank of this host has to say to the others there, which give None."""
    place = ranks.layout
    if place.local_size == place.world_size:
        return ranks.start.share(None if text is None else text.encode()).decode()
    # rank 0 tells all ranks alike, but each host has a word of its own: it goes over a file, which a kill may leave
    token = secrets.token_hex(8) if place.leads else ""
    token = ranks.start.share(token.encode() if place.leads else None).decode()
    note = Path(tempfile.gettempdir()) / f"benthic-slabs-{token}.json"
    try:
        if text is not None:
            note.write_text(text, encoding="utf-8")
        ranks.barrier()
        told = note.read_text(encoding="utf-8") if text is None else text
        ranks.barrier()
    finally:
        if text is not None:
            note.unlink(missing_ok=True)
    return told


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
        tidy = bool(ranks.least(int(not floor.report.misplaced_pages)))
        if place.cp_size > 1 and not tidy:
            find_foreign(config, floor, namespace=namespace.digest, geometry=geometry, num_ranks=place.cp_size, io=io)
            ranks.barrier()  # nobody's writers may start before all have looked
    except BaseException:
        if floor is not None:
            floor.close()
        raise
    return floor, tidy


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
