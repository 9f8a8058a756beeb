"""Shared slabs of host memory that hold L2's frames, a lane a rank; every rank maps them all.

    frame i of lane o is number n = o * frames_per_lane + i: slab n // frames_per_slab, offset n % frames_per_slab

A slab is a file in /dev/shm or in a hugetlbfs, with a random name and an flock held until the name is gone: it is
unlinked as soon as every rank has mapped it, so a kill leaves nothing, and two servers can't meet. What a kill before
that moment left has no lock any more, and the next start removes it.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benthic.common.errors import CapacityError
from benthic.common.units import GIB, format_size
from benthic.tiers.host.backing import (
    Backing,
    SlabPlan,
    check_capacity,
    choose_backing,
    demand_room,
    plan_slabs,
)
from benthic.tiers.host.faulting import Place, fault_in
from benthic.tiers.host.layout import FRAME_ALIGNMENT
from benthic.tiers.host.pools import HostPools, Machine

NAME_PREFIX = "benthic-l2-"
DEFAULT_MAX_SLAB_BYTES = 480 * GIB  # one cudaHostRegister over about 1 TB fails
POISON = 0xA5

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabGeometry:
    """What every rank must know alike to map the same slabs."""

    frame_bytes: int
    frames_per_lane: int
    num_owners: int
    max_slab_bytes: int = DEFAULT_MAX_SLAB_BYTES

    def __post_init__(self) -> None:
        assert self.frame_bytes > 0
        assert self.frame_bytes % FRAME_ALIGNMENT == 0
        assert self.frames_per_lane > 0
        assert self.num_owners > 0

    def plan(self, page_bytes: int) -> SlabPlan:
        """The slabs, in memory that comes in pages of `page_bytes`."""
        return plan_slabs(self.frame_bytes, self.frames_per_lane * self.num_owners, self.max_slab_bytes, page_bytes)


@dataclass(frozen=True, slots=True)
class Segment:
    """Where the slabs are, until they are unlinked: rank 0 tells the others."""

    backing: Backing
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes of one slab that belongs to the own lane."""

    slab: int
    start: int  # bytes from the slab's begin
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PinReport:
    """Whether the device copies straight from and to the own lane. `reason`: why not, what it costs, what to do."""

    pinned: bool
    num_bytes: int
    reason: str = ""


class Registrar(Protocol):
    """The CUDA runtime's door to host memory. Both raise RuntimeError."""

    def register(self, address: int, num_bytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...


class HostSlabs:
    """The mapped slabs of one rank. Owns the mappings and, until `unlink`, the names and the locks on them."""

    def __init__(self, geometry: SlabGeometry, rank: int, segment: Segment, files: list[int], maps: list[mmap.mmap]):
        self.geometry = geometry
        self.rank = rank
        self.segment = segment
        self.plan = geometry.plan(segment.backing.page_bytes)
        self._files = files
        self._maps = maps
        self._views = [memoryview(slab) for slab in maps]
        self._bases = [_address(slab) for slab in maps]
        self._linked = True
        self._present = False
        self._registrar: Registrar | None = None
        self._registered: list[int] = []
        self.pinned = False

    @classmethod
    def open(cls, geometry: SlabGeometry, *, backing: str = "auto", pools: HostPools | None = None) -> "HostSlabs":
        """The slabs of a single rank: created, mapped and unlinked. Raises as `create`."""
        slabs = cls.create(geometry, rank=0, backing=backing, pools=pools)
        slabs.unlink()
        return slabs

    @classmethod
    def create(
        cls, geometry: SlabGeometry, *, rank: int = 0, backing: str = "auto", pools: HostPools | None = None
    ) -> "HostSlabs":
        """New slabs, each checked, made and mapped before the next, after dead servers' ones are removed.

        Raises CapacityError with need and have, ConfigError for a mount that does not exist.
        """
        pools = pools or Machine()
        for folder in {choose_backing(backing, 0, pools).folder, choose_backing("shm", 0, pools).folder}:
            remove_leftovers(folder)
        chosen = _choose(geometry, backing, pools)
        plan, name = geometry.plan(chosen.page_bytes), NAME_PREFIX + secrets.token_hex(8)
        files: list[int] = []
        maps: list[mmap.mmap] = []
        paths: list[Path] = []
        try:
            for index, size in enumerate(plan.slab_bytes):
                # a mapping reserves hugepages at once, but other memory only when it is touched
                pending = 0 if chosen.kind == "hugetlbfs" else sum(plan.slab_bytes[:index])
                demand_room(chosen, size, pools, pending)
                path, file = _new_file(chosen.folder / f"{name}-{index}")
                paths.append(path)
                files.append(file)
                os.ftruncate(file, size)
                maps.append(_map(file, size, chosen, pools))
        except BaseException:
            _discard(paths, files, maps)
            raise
        return cls(geometry, rank, Segment(chosen, tuple(paths)), files, maps)

    @classmethod
    def attach(cls, geometry: SlabGeometry, segment: Segment, *, rank: int) -> "HostSlabs":
        """Map the slabs that another rank has created, before it unlinks them. Raises CapacityError, OSError."""
        files: list[int] = []
        maps: list[mmap.mmap] = []
        try:
            plan = geometry.plan(segment.backing.page_bytes)
            for path, size in zip(segment.paths, plan.slab_bytes, strict=True):
                files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                maps.append(_map(files[-1], size, segment.backing, Machine()))
        except BaseException:
            _discard((), files, maps)
            raise
        slabs = cls(geometry, rank, segment, files, maps)
        slabs._linked = False  # the name is its creator's to remove
        return slabs

    @property
    def frame_bytes(self) -> int:
        return self.geometry.frame_bytes

    @property
    def num_frames(self) -> int:
        """Frames of the own lane."""
        return self.geometry.frames_per_lane

    def unlink(self) -> None:
        """Take the names away: call when every rank has mapped the slabs. They live as long as a mapping does."""
        if not self._linked:
            return
        for path in self.segment.paths:
            path.unlink(missing_ok=True)
        self._linked = False

    def fault_in(self, progress: Progress = lambda done, total: None) -> None:
        """Bring the own lane's memory in, side by side in threads; call once before the first frame is used.

        Raises CapacityError where the memory has gone to somebody else since the check.
        """
        places = [
            Place(self.span_address(span), span.num_bytes, self._files[span.slab], span.start) for span in self.spans()
        ]
        where = self.segment.backing.folder
        try:
            fault_in(places, progress)
        except OSError as error:
            total = format_size(sum(place.num_bytes for place in places))
            raise CapacityError(
                f"{where} ran out of memory while {total} were brought in (error {error.errno}): another program took "
                f"it after the check; free memory or lower --l2-size"
            ) from None
        self._present = True

    def register_cuda(self, registrar: Registrar | None = None) -> PinReport:
        """Register the own lane with CUDA, slab by slab; call after `fault_in`. A failure leaves it usable, unpinned.

        `registrar` stands in for the CUDA runtime of the current device. Raises CapacityError where a registration
        would be larger than `max_slab_bytes`.
        """
        if registrar is None:
            from benthic.tiers.host.cudart import Cudart, current_device  # loads torch, which the doctor does without

            registrar = Cudart(current_device())
        self._registrar = registrar
        spans = list(self.spans())
        total = sum(span.num_bytes for span in spans)
        try:
            for span in spans:
                register(registrar, self.span_address(span), span.num_bytes, self.geometry.max_slab_bytes)
                self._registered.append(self.span_address(span))
        except RuntimeError as error:
            return PinReport(False, total, _unpinned(total, error))
        self.pinned = True
        return PinReport(True, total)

    def frame(self, index: int) -> memoryview:
        """Frame `index` of the own lane: `frame_bytes` writable bytes at a multiple of 4 KiB."""
        slab, offset = self._locate(index)
        return self._views[slab][offset : offset + self.frame_bytes]

    def frame_address(self, index: int) -> int:
        """Where frame `index` of the own lane lies in this process."""
        slab, offset = self._locate(index)
        return self._bases[slab] + offset

    def spans(self) -> Iterator[Span]:
        """The own lane as runs of bytes, one in each slab that holds a part of it."""
        first = self.rank * self.geometry.frames_per_lane
        end, per_slab = first + self.geometry.frames_per_lane, self.plan.frames_per_slab
        while first < end:
            slab, frame = divmod(first, per_slab)
            count = min(per_slab - frame, end - first)
            yield Span(slab, frame * self.frame_bytes, count * self.frame_bytes)
            first += count

    def span_address(self, span: Span) -> int:
        """Where the span lies in this process."""
        return self._bases[span.slab] + span.start

    def poison(self, index: int) -> None:
        """Fill a freed frame, so that a late write or an early read shows. For tests."""
        ctypes.memset(self.frame_address(index), POISON, self.frame_bytes)

    def close(self) -> None:
        """Unmap, and unlink where that is still to be done. No frame may be used any more."""
        self.unlink()
        for address in self._registered:
            assert self._registrar is not None
            with contextlib.suppress(RuntimeError):  # the device has failed: the process's end undoes it
                self._registrar.unregister(address)
        self._registered, self.pinned = [], False
        for view in self._views:
            with contextlib.suppress(BufferError):  # a frame is still held: its holder's end unmaps
                view.release()
        _discard((), self._files, self._maps)
        self._files, self._maps, self._views = [], [], []

    def _locate(self, index: int) -> tuple[int, int]:
        assert self._present, "fault_in comes before the first use: touching absent memory may end the process"
        assert 0 <= index < self.geometry.frames_per_lane, f"frame {index} of {self.geometry.frames_per_lane}"
        slab, frame = divmod(self.rank * self.geometry.frames_per_lane + index, self.plan.frames_per_slab)
        return slab, frame * self.geometry.frame_bytes


def remove_leftovers(folder: Path) -> int:
    """Remove slabs in `folder` that nobody holds the lock of: their server was killed before it unlinked them.

    Returns how many. Other users' files, and those that vanish meanwhile, are passed over.
    """
    removed = 0
    for path in folder.glob(NAME_PREFIX + "*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed += 1
        except OSError:
            continue
        finally:
            os.close(file)
    return removed


def register(registrar: Registrar, address: int, num_bytes: int, max_bytes: int) -> None:
    """One registration. Raises CapacityError beyond the bound: CUDA's own error there speaks of something else."""
    if num_bytes > max_bytes:
        raise CapacityError(
            f"registering {format_size(num_bytes)} of host memory at once exceeds the bound of "
            f"{format_size(max_bytes)}; split it into slabs, or raise BENTHIC_MAX_SLAB_GIB if the driver takes more"
        )
    registrar.register(address, num_bytes)


def _unpinned(num_bytes: int, error: RuntimeError) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
    return (
        f"the host tier works unpinned: registering {format_size(num_bytes)} failed ({error}; memlock limit {shown}); "
        f"copies take several times as long; raise the limit (ulimit -l unlimited, LimitMEMLOCK=infinity, "
        f"docker run --ulimit memlock=-1) or lower --l2-size"
    )


def _choose(geometry: SlabGeometry, wish: str, pools: HostPools) -> Backing:
    """The backing that holds everything, whole pages counted."""
    backing = choose_backing(wish, geometry.frame_bytes * geometry.frames_per_lane * geometry.num_owners, pools)
    total = geometry.plan(backing.page_bytes).total_bytes
    return check_capacity(total, wish, pools)


def _new_file(path: Path) -> tuple[Path, int]:
    """A new file that this process holds the lock of."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # another start took it for a leftover in the moment before the lock


def _map(file: int, size: int, backing: Backing, pools: HostPools) -> mmap.mmap:
    try:
        slab = mmap.mmap(file, size)
    except OSError as error:
        if error.errno == errno.ENOMEM:  # somebody else took the hugepages since the check
            demand_room(backing, size, pools)
        raise CapacityError(
            f"can't map {format_size(size)} of {backing.folder}: {os.strerror(error.errno or 0)}; lower --l2-size"
        ) from None
    with contextlib.suppress(OSError):  # large pages where the machine allows them for shared memory: fewer faults
        slab.madvise(mmap.MADV_HUGEPAGE)
    return slab


def _address(slab: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slab))


def _discard(paths: tuple[Path, ...] | list[Path], files: list[int], maps: list[mmap.mmap]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    for slab in maps:
        with contextlib.suppress(BufferError):
            slab.close()
    for file in files:
        os.close(file)
