"""The buffers between L2 and the disk: a page waits here for its write, so that its L2 frame is free at once.

A fixed number of them is made at start. The core counts them and submits a spill only while its frames fit, so a slow
disk costs cache and not memory; `take` answering None is the backstop, not the rule.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benthic.tiers.disk.format import PAGE
from benthic.tiers.disk.slab import aligned_buffer


@dataclass(frozen=True, slots=True, eq=False)
class StagingBuffer:
    """One slot's worth of memory, 4 KiB aligned: the header block and the frame lie side by side."""

    header: memoryview
    frame: memoryview
    array: NDArray[np.uint8]  # of the frame

    def fill(self, frame: memoryview) -> None:
        """Copy an L2 frame in, with the interpreter lock released."""
        np.copyto(self.array, np.frombuffer(frame, np.uint8))


class Staging:
    """A free list over one block of memory. One thread takes; any gives back, a deque's ends being atomic."""

    def __init__(self, num_buffers: int, frame_bytes: int) -> None:
        self.num_buffers = num_buffers
        self._size = PAGE + frame_bytes
        self._block = aligned_buffer(max(1, num_buffers) * self._size)
        self._num_made = 0  # buffers are cut out of the block as they are first needed, from its beginning
        self._free: deque[StagingBuffer] = deque()

    @property
    def num_free(self) -> int:
        """Buffers that nobody holds."""
        return self.num_buffers - self._num_made + len(self._free)

    def take(self) -> StagingBuffer | None:
        """A buffer, or None where all are in use."""
        try:
            return self._free.pop()  # the one used last: it is in the processor's cache
        except IndexError:
            return self._make() if self._num_made < self.num_buffers else None

    def give(self, buffer: StagingBuffer) -> None:
        """Hand a buffer back; the caller's write from it has returned."""
        self._free.append(buffer)
        assert len(self._free) <= self._num_made, "a staging buffer was handed back twice"

    def _make(self) -> StagingBuffer:
        slot = self._block[self._num_made * self._size :][: self._size]
        self._num_made += 1
        frame = slot[PAGE:]
        return StagingBuffer(slot[:PAGE], frame, np.frombuffer(frame, np.uint8))
