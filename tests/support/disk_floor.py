"""A small disk floor for tests: pages whose bytes follow from their number, stored and read by the floor's parts."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from benthic.config.disk import DiskConfig, DiskSpec
from benthic.tiers.disk.floor import RankFloor, open_floor
from benthic.tiers.disk.format import PAGE, FrameGeometry, Verdict, check, pack_header
from benthic.tiers.disk.index import Entry
from benthic.tiers.disk.io import DiskIO, SystemDisk
from benthic.tiers.disk.slab import Slab, aligned_buffer

GEOMETRY = FrameGeometry(frame_bytes=4096, payload_mask=1, payloads=(("target_kv", 4000),))
NAMESPACE = hashlib.sha256(b"the tests' model").digest()
WORDS = {"model": "a model of the tests", "kv_dtype": "float32"}
KIB = 1024


class NoSync(SystemDisk):
    """For tests that start hundreds of floors: waits for no disk. What must be durable is tested on a trace."""

    def fdatasync(self, fd: int) -> None:
        pass

    def fsync_folder(self, path: Path) -> None:
        pass


def page_hash(number: int) -> bytes:
    """The content hash of page `number`."""
    return hashlib.sha256(b"page %d" % number).digest()


def page_bytes(number: int, geometry: FrameGeometry = GEOMETRY) -> bytes:
    """The frame of page `number`: bytes that no other page has, padding included."""
    return (page_hash(number + 10**6) * (geometry.frame_bytes // 32 + 1))[: geometry.frame_bytes]


def config_for(path: Path, budget: int = 1024 * KIB, **more: object) -> DiskConfig:
    """A floor of one disk."""
    return DiskConfig(disks=(DiskSpec(path=path, budget_bytes=budget),), **more)  # type: ignore[arg-type]


def open_one(
    config: DiskConfig,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    namespace: bytes = NAMESPACE,
    geometry: FrameGeometry = GEOMETRY,
    io: DiskIO | None = None,
    prepare: bool = True,
) -> RankFloor:
    """`open_floor` with the tests' model."""
    return open_floor(
        config, namespace=namespace, words=WORDS, geometry=geometry, rank=rank, num_ranks=num_ranks,
        io=io or SystemDisk(), prepare=prepare,
    )  # fmt: skip


def write_page(slab: Slab, slot: int, number: int) -> None:
    """Write page `number` to a slot; not synced."""
    buffer = aligned_buffer(slab.slot_bytes)
    buffer[PAGE:] = page_bytes(number, slab.geometry)
    pack_header(buffer[:PAGE], page_hash(number), buffer[PAGE:], slab.geometry)
    slab.write(slot, buffer[:PAGE], buffer[PAGE:])


def read_page(slab: Slab, slot: int, number: int) -> Verdict:
    """What a read of page `number` from a slot says; where it says OK the bytes are compared too."""
    buffer = aligned_buffer(slab.slot_bytes)
    slab.read(slot, buffer[:PAGE], buffer[PAGE:])
    verdict = check(buffer[:PAGE], page_hash(number), buffer[PAGE:], slab.geometry)
    if verdict is Verdict.OK:
        size = slab.geometry.payload_bytes
        assert buffer[PAGE : PAGE + size] == page_bytes(number, slab.geometry)[:size], "a wrong byte passed"
    return verdict


def store(floor: RankFloor, numbers: Iterable[int], *, num_ranks: int = 1, ages: dict[int, int] | None = None) -> None:
    """Store pages in the floor, in the right order; page n has position n and, unless said, age n."""
    puts = []
    for number in numbers:
        slot = floor.pool.take()
        assert slot is not None, "the pool is empty"
        write_page(floor.slab, slot, number)
        puts.append((page_hash(number), Entry(slot, number, (ages or {}).get(number, number))))
    floor.slab.sync()
    floor.index.apply(puts, [])
    floor.live.update(puts)


def readable(floor: RankFloor, numbers: Iterable[int]) -> list[int]:
    """Which of these pages the floor has and gives back whole."""
    found = [(n, floor.live.get(page_hash(n))) for n in numbers]
    return [n for n, entry in found if entry is not None and read_page(floor.slab, entry.slot, n) is Verdict.OK]


def flip_bit(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, bit // 8)[0] ^ (1 << bit % 8)
        os.pwrite(fd, bytes([byte]), bit // 8)
    finally:
        os.close(fd)
