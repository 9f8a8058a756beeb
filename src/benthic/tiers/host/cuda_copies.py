"""The mover on CUDA: the copy engines move pages, on a stream a direction, one strided copy a page, payload and group.

    device   [layers, pages, slice]   a page's slices lie `pages * slice` apart
    host     [layers, slice]          they lie side by side: a frame is page-first

So a page is rows of `slice` bytes with two pitches, which `cudaMemcpy2DAsync` copies at the link's rate; a copy a slice
reaches a quarter of it, and kernels that store to host memory slow a running decode to half.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from benthic.tiers.host.copies import LayeredCopies
from benthic.tiers.host.cpu_copies import demand_shape
from benthic.tiers.host.cudart import DEVICE_TO_HOST, HOST_TO_DEVICE, Cudart
from benthic.tiers.host.layout import FrameLayout
from benthic.tiers.host.progress import Mark
from benthic.tiers.host.slabs import HostSlabs

CHUNK_PAGES = 64  # pages between two events
MAX_QUEUED = 512
"""Copies under way in a direction. A launch queue that is full blocks its caller, who holds the interpreter lock."""

Copier = Callable[[int, int], None]  # (destination address, source address)


class CudaRuntime(Protocol):
    """What the mover needs of the CUDA runtime; tests put a simulated device here. Handles are opaque."""

    max_pitch: int

    def start_thread(self) -> None: ...
    def current_stream(self) -> int: ...
    def create_stream(self) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def record(self, stream: int) -> Any: ...
    def wait(self, stream: int, event: Any) -> None: ...
    def reached(self, event: Any) -> bool: ...
    def synchronize(self, event: Any) -> None: ...
    def copier(
        self, stream: int, kind: int, dst_pitch: int, src_pitch: int, width: int, height: int, pinned: bool
    ) -> Copier: ...


def cuda_copies(slabs: HostSlabs, layout: FrameLayout, pools: Mapping[str, torch.Tensor]) -> LayeredCopies:
    """A CopyEngine between `pools` (payload name: [layers, pages, …] on one CUDA device) and the own lane of `slabs`.

    Register the slabs first; unregistered they work, at a fraction of the rate.
    """
    runtime = Cudart(next(iter(pools.values())).device)
    runtime.start_thread()  # the caller will poll: a call on another device would start a context there
    return LayeredCopies(CudaMover(slabs, layout, pools, runtime), layout.num_layers)


class _Direction:
    """One direction's stream and what is under way there; used by one thread alone."""

    def __init__(self, runtime: CudaRuntime, kind: int) -> None:
        self.kind = kind
        self.stream = runtime.create_stream()
        self._runtime = runtime
        self._waited: Mark = None
        self._queued: deque[tuple[Mark, int]] = deque()
        self._num_queued = 0

    def wait(self, after: Mark) -> None:
        """What is queued from now on waits for the mark."""
        if after is not None and after is not self._waited:
            self._runtime.wait(self.stream, after)
            self._waited = after

    def mark(self, num_copies: int) -> Mark:
        """The mark behind `num_copies` more; sleeps while too many are under way."""
        mark = self._runtime.record(self.stream)
        self._queued.append((mark, num_copies))
        self._num_queued += num_copies
        while self._num_queued > MAX_QUEUED:
            oldest, count = self._queued.popleft()
            self._runtime.synchronize(oldest)
            self._num_queued -= count
        return mark


class CudaMover:
    """Implements copies.Mover. Owns the two streams."""

    def __init__(
        self, slabs: HostSlabs, layout: FrameLayout, pools: Mapping[str, torch.Tensor], runtime: CudaRuntime
    ) -> None:
        assert layout.frame_bytes == slabs.frame_bytes
        self._runtime = runtime
        self._pools = []  # (payload, its offset in a frame, the pool's address, bytes from a layer to the next)
        for payload in layout.payloads:
            pool = pools[payload.name]
            demand_shape(payload, pool)
            layer_bytes = pool.shape[1] * payload.slice_bytes
            self._pools.append((payload, layout.offset(payload), pool.data_ptr(), layer_bytes))
        self._keep = slabs, dict(pools)  # the addresses are theirs
        self._frames = [slabs.frame_address(index) for index in range(slabs.num_frames)]
        self._pinned = slabs.pinned
        self._out = _Direction(runtime, DEVICE_TO_HOST)
        self._in = _Direction(runtime, HOST_TO_DEVICE)
        self._copiers: dict[tuple[int, int, int, int], Copier] = {}

    def stream(self) -> object:
        """torch's current stream."""
        return self._runtime.current_stream()

    def mark(self, stream: object) -> Mark:
        """An event."""
        assert isinstance(stream, int)
        return self._runtime.record(stream)

    def hold(self, stream: object, mark: Mark) -> None:
        """On the device; the calling thread goes on."""
        assert isinstance(stream, int)
        if mark is not None:
            self._runtime.wait(stream, mark)

    def reached(self, mark: Mark) -> bool:
        """Ask the event."""
        return mark is None or self._runtime.reached(mark)

    def start_thread(self) -> None:
        """A thread starts on device 0."""
        self._runtime.start_thread()

    def backup(self, pages: Sequence[int], frames: Sequence[int], layers: range, after: Mark) -> Mark:
        """See copies.Mover."""
        return self._copy(self._out, pages, frames, layers, after)

    def load_back(self, frames: Sequence[int], pages: Sequence[int], layers: range, after: Mark) -> Mark:
        """See copies.Mover."""
        return self._copy(self._in, pages, frames, layers, after)

    def close(self) -> None:
        """See copies.Mover."""
        for direction in (self._out, self._in):
            self._runtime.destroy_stream(direction.stream)

    def _copy(
        self, direction: _Direction, pages: Sequence[int], frames: Sequence[int], layers: range, after: Mark
    ) -> Mark:
        direction.wait(after)
        mark = after
        try:
            for start in range(0, len(pages), CHUNK_PAGES):
                chunk = slice(start, start + CHUNK_PAGES)
                mark = direction.mark(self._queue(direction, pages[chunk], frames[chunk], layers))
        except BaseException:
            with contextlib.suppress(Exception):  # what was queued must be over before the frames are free
                self._runtime.synchronize(self._runtime.record(direction.stream))
            raise
        return mark

    def _queue(self, direction: _Direction, pages: Sequence[int], frames: Sequence[int], layers: range) -> int:
        """Queue the copies of some pages; how many there are."""
        count, lane = 0, self._frames
        for index, (payload, offset, pool, layer_bytes) in enumerate(self._pools):
            first, stop = payload.own_layers(layers)
            if first >= stop:
                continue
            copy = self._copier(direction, index, first, stop)
            size = payload.slice_bytes
            on_device, on_host = pool + first * layer_bytes, offset + first * size
            if direction is self._in:
                for page, frame in zip(pages, frames, strict=True):
                    copy(on_device + page * size, lane[frame] + on_host)
            else:
                for page, frame in zip(pages, frames, strict=True):
                    copy(lane[frame] + on_host, on_device + page * size)
            count += len(pages)
        return count

    def _copier(self, direction: _Direction, index: int, first: int, stop: int) -> Copier:
        key = (direction.kind, index, first, stop)
        copier = self._copiers.get(key)
        if copier is None:
            payload, _, _, layer_bytes = self._pools[index]
            size = payload.slice_bytes
            dst, src = (layer_bytes, size) if direction is self._in else (size, layer_bytes)
            copier = self._runtime.copier(direction.stream, direction.kind, dst, src, size, stop - first, self._pinned)
            self._copiers[key] = copier
        return copier
