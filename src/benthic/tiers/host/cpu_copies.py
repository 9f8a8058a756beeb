"""The mover without a device: pages are in ordinary memory, and a copy is over when its call returns."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.tiers.host.copies import LayeredCopies
from benthic.tiers.host.layout import FrameLayout, PayloadLayout
from benthic.tiers.host.progress import Mark
from benthic.tiers.host.slabs import HostSlabs

Bytes = NDArray[np.uint8]


def cpu_copies(slabs: HostSlabs, layout: FrameLayout, pools: Mapping[str, torch.Tensor]) -> LayeredCopies:
    """A CopyEngine between `pools` (payload name: [layers, pages, …] in host memory) and the own lane of `slabs`."""
    return LayeredCopies(CpuMover(slabs, layout, pools), layout.num_layers)


class CpuMover:
    """Implements copies.Mover with one strided numpy copy a page, payload and group; numpy lets go of the lock."""

    def __init__(self, slabs: HostSlabs, layout: FrameLayout, pools: Mapping[str, torch.Tensor]) -> None:
        assert layout.frame_bytes == slabs.frame_bytes
        self._slabs = slabs
        self._payloads = [
            (payload, layout.offset(payload), _as_bytes(payload, pools[payload.name])) for payload in layout.payloads
        ]

    def stream(self) -> object:
        """There is none: work is done when its call returns."""
        return None

    def mark(self, stream: object) -> Mark:
        """Everything so far is done."""
        return None

    def hold(self, stream: object, mark: Mark) -> None:
        """Nothing to wait for."""

    def reached(self, mark: Mark) -> bool:
        """Always."""
        return True

    def start_thread(self) -> None:
        """Nothing to prepare."""

    def backup(self, pages: Sequence[int], frames: Sequence[int], layers: range, after: Mark) -> Mark:
        """See copies.Mover."""
        for payload, offset, pool in self._payloads:
            first, stop = payload.own_layers(layers)
            if first < stop:
                for page, frame in zip(pages, frames, strict=True):
                    self._slices(payload, offset, frame)[first:stop] = pool[first:stop, page]

    def load_back(self, frames: Sequence[int], pages: Sequence[int], layers: range, after: Mark) -> Mark:
        """See copies.Mover."""
        for payload, offset, pool in self._payloads:
            first, stop = payload.own_layers(layers)
            if first < stop:
                for page, frame in zip(pages, frames, strict=True):
                    pool[first:stop, page] = self._slices(payload, offset, frame)[first:stop]

    def close(self) -> None:
        """Nothing is under way."""

    def _slices(self, payload: PayloadLayout, offset: int, frame: int) -> Bytes:
        """The payload in a frame, uint8 [layers, slice_bytes]."""
        flat = np.frombuffer(self._slabs.frame(frame), np.uint8, payload.num_bytes, offset)
        return flat.reshape(payload.num_layers, payload.slice_bytes)


def demand_shape(payload: PayloadLayout, pool: torch.Tensor) -> None:
    """The pool [layers, pages, …] has the payload's layers and slices, contiguous."""
    assert pool.is_contiguous()
    assert pool.shape[0] == payload.num_layers, f"{payload.name}: {pool.shape[0]} layers, not {payload.num_layers}"
    assert pool[0, 0].nbytes == payload.slice_bytes, f"{payload.name}: {pool[0, 0].nbytes} bytes a slice"


def _as_bytes(payload: PayloadLayout, pool: torch.Tensor) -> Bytes:
    """The same memory as uint8 [layers, pages, slice_bytes]."""
    demand_shape(payload, pool)
    return pool.view(torch.uint8).numpy().reshape(pool.shape[0], pool.shape[1], payload.slice_bytes)
