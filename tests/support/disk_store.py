"""A disk store on a folder, driven as the scheduler drives it, with pages whose bytes follow from their number."""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from benthic.common.units import KIB
from benthic.config.disk import DiskConfig, DiskSpec
from benthic.kvcache.commands import ClearDisk, Drain, Lookup, Reload, Spill, Touch
from benthic.tiers.disk.floor import RankFloor, find_foreign, open_floor
from benthic.tiers.disk.format import PAGE, FrameGeometry, Verdict, check
from benthic.tiers.disk.index import map_bytes_for
from benthic.tiers.disk.io import DiskIO, SystemDisk
from benthic.tiers.disk.slab import aligned_buffer
from benthic.tiers.disk.store import DiskStore

FRAME_BYTES = 8192
PAYLOAD_BYTES = 8000  # the rest of a frame is padding, which no checksum covers
GEOMETRY = FrameGeometry(FRAME_BYTES, 1, (("kv", PAYLOAD_BYTES),))
NAMESPACE = hashlib.sha256(b"test namespace").digest()
WORDS = {"model": "test", "dtype": "float32", "page_size": "64"}
PATIENCE_S = 30.0


def page_hash(page: int) -> bytes:
    """The content hash of page `page`."""
    return hashlib.sha256(page.to_bytes(8, "little")).digest()


def page_bytes(page: int, size: int = PAYLOAD_BYTES) -> bytes:
    """The payload of page `page`."""
    return np.random.default_rng(page).bytes(size)


class Frames:
    """Host frames in ordinary memory."""

    def __init__(self, count: int, frame_bytes: int = FRAME_BYTES) -> None:
        self.frame_bytes = frame_bytes
        self.count = count
        self._block = aligned_buffer(count * frame_bytes)

    def frame(self, index: int) -> memoryview:
        """Frame `index`."""
        return self._block[index * self.frame_bytes : (index + 1) * self.frame_bytes]

    def fill(self, index: int, page: int) -> None:
        """Put a page's payload into a frame."""
        self.frame(index)[:PAYLOAD_BYTES] = page_bytes(page)

    def holds(self, index: int, page: int) -> bool:
        """Whether the frame has exactly this page's payload."""
        return self.frame(index)[:PAYLOAD_BYTES] == page_bytes(page)


def budget_for(num_slots: int, geometry: FrameGeometry = GEOMETRY) -> int:
    """The bytes that one file of so many slots takes, with its index and the small files."""
    return num_slots * geometry.slot_bytes + map_bytes_for(num_slots) + 64 * KIB


def config_for(
    folder: Path, num_slots: int, *, geometry: FrameGeometry = GEOMETRY, num_staging: int = 64, **changes: object
) -> DiskConfig:
    """A floor on one disk with room for about `num_slots` slots a rank, if one rank uses it."""
    values: dict[str, object] = {
        "disks": (DiskSpec(path=folder, budget_bytes=budget_for(num_slots, geometry)),),
        "staging_bytes": num_staging * geometry.slot_bytes,
        "queue_depth": 4,
        **changes,
    }
    return DiskConfig(**values)  # type: ignore[arg-type]  # the values are of the fields' types


class Driver:
    """A store with its floor, frames and operation numbers; commands return their results."""

    def __init__(
        self,
        config: DiskConfig,
        *,
        geometry: FrameGeometry = GEOMETRY,
        io: DiskIO | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        num_owners: int = 1,
        num_frames: int = 256,
        clock: Callable[[], float] = time.monotonic,
        age: int = 0,
        look_elsewhere: bool = False,
    ) -> None:
        self.floor: RankFloor = open_floor(
            config,
            namespace=NAMESPACE,
            words=WORDS,
            geometry=geometry,
            rank=rank,
            num_ranks=num_ranks,
            io=io or SystemDisk(),
        )
        if look_elsewhere:
            find_foreign(
                config,
                self.floor,
                namespace=NAMESPACE,
                geometry=geometry,
                num_ranks=num_ranks,
                io=io or SystemDisk(),
            )
        self.frames = Frames(num_frames, geometry.frame_bytes)
        self.store = DiskStore(self.floor, config, rank=rank, num_owners=num_owners, frames=self.frames, clock=clock)
        self.age = age
        self._next_op = 0
        self._seen: dict[int, int] = {}

    def op(self) -> int:
        """A new operation number."""
        self._next_op += 1
        return self._next_op

    def wait(self, ops: Iterable[int], patience_s: float = PATIENCE_S) -> list[int]:
        """Poll until all of `ops` are answered; their values."""
        ops = list(ops)
        until = time.monotonic() + patience_s
        while not all(op in self._seen for op in ops):
            self.poll()
            assert time.monotonic() < until, f"no answer for {[op for op in ops if op not in self._seen]}"
            time.sleep(0.0005)
        return [self._seen[op] for op in ops]

    def poll(self) -> dict[int, int]:
        """Fetch what has come; every answer so far."""
        for completion in self.store.poll():
            assert completion.op not in self._seen, f"operation {completion.op} was answered twice"
            self._seen[completion.op] = completion.value
        return self._seen

    def begin_spill(
        self, pages: Sequence[int], *, first: int = 0, age: int | None = None, frame: int = 0
    ) -> tuple[int, int]:
        """Submit a spill of `pages` from the frames from `frame` on; its gather and durable operations."""
        for i, page in enumerate(pages):
            self.frames.fill(frame + i, page)
        gather, durable = self.op(), self.op()
        self.age += 1
        self.store.submit(
            Spill(
                gather=gather,
                durable=durable,
                first=first,
                frames=tuple(range(frame, frame + len(pages))),
                hashes=tuple(map(page_hash, pages)),
                age=self.age if age is None else age,
            )
        )
        return gather, durable

    def spill(self, pages: Sequence[int], *, first: int = 0, age: int | None = None) -> int:
        """Spill and wait; the value of the durable operation."""
        gather, durable = self.begin_spill(pages, first=first, age=age)
        self.wait([gather])
        return self.wait([durable])[0]

    def lookup(self, pages: Sequence[int], *, first: int = 0) -> int:
        """How many leading pages the disk vouches for."""
        op = self.op()
        self.store.submit(Lookup(op=op, first=first, hashes=tuple(map(page_hash, pages))))
        return self.wait([op])[0] - 1

    def begin_reload(self, pages: Sequence[int], *, first: int = 0, frame: int = 0) -> int:
        """Submit a reload into the frames from `frame` on, which are blanked before."""
        op = self.op()
        frames = tuple(range(frame, frame + len(pages)))
        for index in frames:
            self.frames.frame(index)[:] = bytes(self.frames.frame_bytes)
        self.store.submit(Reload(op=op, first=first, frames=frames, hashes=tuple(map(page_hash, pages))))
        return op

    def reload(self, pages: Sequence[int], *, first: int = 0, frame: int = 0) -> int:
        """Reload and wait; how many leading pages came. Every one of them is compared."""
        count = self.wait([self.begin_reload(pages, first=first, frame=frame)])[0] - 1
        for i in range(count):
            assert self.frames.holds(frame + i, pages[i]), f"page {pages[i]} came back with wrong bytes"
        return count

    def drain(self, reload: int) -> int:
        """Submit the drain of a reload."""
        op = self.op()
        self.store.submit(Drain(op=op, reload=reload))
        return op

    def clear(self) -> int:
        """Clear the floor and wait."""
        op = self.op()
        self.store.submit(ClearDisk(op=op))
        return self.wait([op])[0]

    def touch(self, pages: Sequence[int], age: int | None = None) -> None:
        """An admission has used these pages."""
        self.age += 1
        self.store.submit(Touch(first=0, hashes=tuple(map(page_hash, pages)), age=self.age if age is None else age))

    def held(self, pages: Iterable[int]) -> set[int]:
        """Which of the pages the disk has, asked one by one."""
        return {page for page in pages if self.lookup([page])}

    def close(self, finish_by_s: float = PATIENCE_S) -> None:
        """Close the store and check its books."""
        self.store.close(finish_by_s)
        self.store.check()


def read_everything(config: DiskConfig, pages: Iterable[int]) -> set[int]:
    """Start on a folder without serving: the pages that are found and verify, each compared with what it should be.

    Raises AssertionError for a wrong byte and for a slot with two owners.
    """
    floor = open_floor(
        config, namespace=NAMESPACE, words=WORDS, geometry=GEOMETRY, rank=0, num_ranks=1, io=SystemDisk()
    )
    floor.pool.check()
    assert len({entry.slot for entry in floor.live.values()}) == len(floor.live), "a slot has two owners"
    page_of = {page_hash(page): page for page in pages}
    header, frame = aligned_buffer(PAGE), aligned_buffer(FRAME_BYTES)
    found = set()
    for name, entry in floor.live.items():
        floor.slab.read(entry.slot, header, frame)
        if check(header, name, frame, GEOMETRY) is Verdict.OK:
            assert frame[:PAYLOAD_BYTES] == page_bytes(page_of[name]), f"page {page_of[name]} has wrong bytes"
            found.add(page_of[name])
    floor.close()
    return found


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder.rmdir()
