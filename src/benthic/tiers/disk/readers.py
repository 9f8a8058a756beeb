"""The threads on the way from the disk: they read pages into L2 frames and verify them, and look over the headers.

What is wrong with a page goes to the keeper, which takes it off the map before the reload is answered.
"""

from collections.abc import Callable, Sequence

from benthic.tiers.disk.format import PAGE, FrameGeometry, Verdict, check
from benthic.tiers.disk.jobs import BadHeader, BadRead, Hash, Message, PageRead, Place
from benthic.tiers.disk.read_queue import ReadQueue
from benthic.tiers.disk.slab import Slab, aligned_buffer
from benthic.tiers.disk.stats import Counts
from benthic.tiers.disk.writers import FrameSource

Post = Callable[[Message], None]

HEADERS_A_BATCH = 64  # then the check looks again whether reads wait


class Reader:
    """One reading thread's parts; it owns a header block."""

    def __init__(
        self,
        reads: ReadQueue,
        frames: FrameSource,
        geometry: FrameGeometry,
        counts: Counts,
        post: Post,
        clock: Callable[[], float],
    ) -> None:
        self._reads = reads
        self._frames = frames
        self._geometry = geometry
        self._counts = counts
        self._post = post
        self._clock = clock
        self._header = aligned_buffer(PAGE)

    def run(self) -> None:
        """Serve the queue until it is closed."""
        while (job := self._reads.next()) is not None:
            op, read = job
            began = self._clock()
            fault = self._read(read)
            if fault is Verdict.OK:
                self._counts.page_read(self._geometry.slot_bytes, began)
                self._reads.verified(op, read)
            else:
                self._reads.failed(op, read)
                self._post(BadRead(op, read, fault))

    def _read(self, read: PageRead) -> Verdict | OSError:
        try:
            frame = self._frames.frame(read.frame)
            read.place.slab.read(read.place.slot, self._header, frame)
            return check(self._header, read.hash, frame, self._geometry)
        except OSError as error:
            return error
        except Exception as error:  # noqa: BLE001  a bug here must not leave the reload without an answer
            return OSError(f"reader: {error!r}")


def check_headers(
    pages: Sequence[tuple[Hash, int]],
    slab: Slab,
    reads: ReadQueue,
    post: Post,
    stopped: Callable[[float], bool],
) -> int:
    """Compare the header in each page's slot with its entry, behind serving; returns how many were looked at.

    `stopped(pause_s)` waits and says whether to give up. A page that has moved on meanwhile is the keeper's to tell.
    """
    block = aligned_buffer(PAGE)
    for done, (page, slot) in enumerate(pages):
        if done % HEADERS_A_BATCH == 0:
            reads.let_reads_go_first(1.0)
            if stopped(0.001):
                return done
        fault: Verdict | OSError
        try:
            slab.read_header(slot, block)
            fault = check(block, page, None, slab.geometry)
        except OSError as error:
            fault = error
        if fault is not Verdict.OK:
            post(BadHeader(page, Place(slab, slot, 0), fault))  # 0: as it was at start
    return len(pages)
