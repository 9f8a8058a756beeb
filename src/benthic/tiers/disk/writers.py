"""The threads on the way to the disk: one copies frames into staging buffers, some write them, one syncs.

They hold no state of their own. Each takes a job, does its one transfer and posts the outcome to the keeper.
"""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from benthic.kvcache.commands import DONE, FAILED, Spill, Touch
from benthic.tiers.disk.format import FrameGeometry, pack_header
from benthic.tiers.disk.jobs import Finish, Message, PageWrite, Staged, StagedPage, Synced, Wrote, own_positions
from benthic.tiers.disk.outbox import Outbox
from benthic.tiers.disk.read_queue import ReadQueue
from benthic.tiers.disk.slab import Slab
from benthic.tiers.disk.staging import Staging

Post = Callable[[Message], None]

PATIENCE_S = 0.25  # how long one write stands back for reads that wait


class FrameSource(Protocol):
    """Where a page's bytes lie in host memory."""

    @property
    def frame_bytes(self) -> int: ...

    def frame(self, index: int) -> memoryview:
        """Writable, 4 KiB aligned, `frame_bytes` long: the frame `index` of this rank's lane."""


class Gatherer:
    """Copies a spill's own frames into staging buffers, so that L2 may have them back: memory to memory, never a disk.

    Touches pass through here as well, and so does the end: the keeper sees them in the order of their submission.
    """

    def __init__(
        self, lane: int, num_lanes: int, frames: FrameSource, staging: Staging, outbox: Outbox, post: Post
    ) -> None:
        self._lane = lane
        self._num_lanes = num_lanes
        self._frames = frames
        self._staging = staging
        self._outbox = outbox
        self._post = post

    def run(self, queue: "SimpleQueue[Spill | Touch | Finish]") -> None:
        """Serve the queue until `Finish` has passed."""
        while True:
            command = queue.get()
            if isinstance(command, Spill):
                self._gather(command)
                continue
            self._post(command)
            if isinstance(command, Finish):
                return

    def _gather(self, spill: Spill) -> None:
        pages: list[StagedPage] = []
        try:
            done = self._copy(spill, pages)
        except Exception:  # noqa: BLE001  whatever a frame source raises, both operations need their answer
            done = False
        if not done:
            for page in pages:
                self._staging.give(page.buffer)
            self._outbox.answer(spill.gather, FAILED)
            self._outbox.answer(spill.durable, FAILED)
            return
        self._outbox.answer(spill.gather, DONE)
        self._post(Staged(spill.durable, pages, spill.age))

    def _copy(self, spill: Spill, pages: list[StagedPage]) -> bool:
        for i in own_positions(spill.first, len(spill.hashes), self._lane, self._num_lanes):
            buffer = self._staging.take()
            if buffer is None:
                return False
            pages.append(StagedPage(spill.hashes[i], spill.first + i, buffer))
            buffer.fill(self._frames.frame(spill.frames[i]))
        return True


def write_pages(
    queue: "SimpleQueue[PageWrite | None]", slab: Slab, geometry: FrameGeometry, reads: ReadQueue, post: Post
) -> None:
    """Body of a writer: header and frame of a page in one transfer, reads first; ends at None."""
    while (write := queue.get()) is not None:
        page = write.page
        try:
            pack_header(page.buffer.header, page.hash, page.buffer.frame, geometry)
            reads.let_reads_go_first(PATIENCE_S)
            slab.write(write.slot, page.buffer.header, page.buffer.frame)
        except OSError as error:
            post(Wrote(write, error))
        except Exception as error:  # noqa: BLE001  a bug here must not leave the page without an outcome
            post(Wrote(write, OSError(f"writer: {error!r}")))
        else:
            post(Wrote(write, None))


def sync_groups(queue: "SimpleQueue[list[PageWrite] | None]", slab: Slab, post: Post) -> None:
    """Body of the syncer: makes the writes of a group durable; ends at None."""
    while (group := queue.get()) is not None:
        try:
            slab.sync()
        except OSError as error:
            post(Synced(group, error))
        except Exception as error:  # noqa: BLE001  as above
            post(Synced(group, OSError(f"syncer: {error!r}")))
        else:
            post(Synced(group, None))
