"""What the engine sees of a rank's disk floor: commands in, completions out, and never a wait.

Behind it: a gatherer (L2 → staging), writers and a syncer (staging → slab), readers (slab → L2), and the keeper, which
alone changes map, index and pool. The scheduler's thread only puts commands into queues and takes answers out.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from benthic.config.disk import DiskConfig
from benthic.kvcache.commands import ClearDisk, Completion, Drain, Lookup, OpId, Reload, Spill, Touch
from benthic.messages.tiers import DiskStats
from benthic.tiers.disk.floor import RankFloor
from benthic.tiers.disk.jobs import Finish, Hash, Message, PageWrite, ThreadError, own_positions
from benthic.tiers.disk.keeper import Keeper, Parts
from benthic.tiers.disk.ledger import Ledger
from benthic.tiers.disk.outbox import Outbox
from benthic.tiers.disk.read_queue import ReadQueue
from benthic.tiers.disk.readers import Reader, check_headers
from benthic.tiers.disk.retire import Service
from benthic.tiers.disk.staging import Staging
from benthic.tiers.disk.stats import Counts, ErrorLog
from benthic.tiers.disk.writers import FrameSource, Gatherer, sync_groups, write_pages

logger = logging.getLogger(__name__)

DiskCommand = Spill | Lookup | Reload | Drain | ClearDisk | Touch

_LINGER_S = 1.0  # beyond its time, for threads that only have to notice the end


class DiskStore:
    """One rank's disk floor at work. `submit`, `poll` and `report_now` are for one thread, the scheduler's.

    `lane` of a rank: rank % num_owners. `queue_depth` transfers each way are under way at once (None: the
    configuration's; where ranks share a disk, this rank's part of it). Starts its threads; `close` ends them.
    """

    def __init__(
        self,
        floor: RankFloor,
        config: DiskConfig,
        *,
        rank: int,
        num_owners: int,
        frames: FrameSource,
        clock: Callable[[], float] = time.monotonic,
        queue_depth: int | None = None,
    ) -> None:
        self._rank = rank
        self._lane, self._num_lanes = rank % num_owners, num_owners
        self._clock = clock
        self.slab = floor.slab
        self._floor = floor
        self._geometry = floor.slab.geometry
        slot_bytes = floor.slab.slot_bytes
        self._staging = Staging(config.staging_for(slot_bytes) // slot_bytes, self._geometry.frame_bytes)
        self._outbox = Outbox()
        self.reads = ReadQueue(self._outbox)
        self._service = Service(str(floor.slab.path))
        self._counts = Counts(clock)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._spills: SimpleQueue[Spill | Touch | Finish] = SimpleQueue()
        self._writes: SimpleQueue[PageWrite | None] = SimpleQueue()
        self._syncs: SimpleQueue[list[PageWrite] | None] = SimpleQueue()
        self._nothing: dict[OpId, int] = {}  # look-ups: the answer that vouches for no page
        self._stopping = threading.Event()
        stored = list(floor.live.items())  # before the keeper begins to change it
        self._keeper = self._make_keeper(floor, config)
        self._num_writers = queue_depth or config.queue_depth
        self._threads = self._start_threads(frames, [(page, entry.slot) for page, entry in stored])

    def submit(self, command: DiskCommand) -> None:
        """Take a command on; its answers come from `poll`."""
        if self._stopping.is_set():
            raise RuntimeError("the disk store is closed")
        match command:
            case Spill():
                self._outbox.expect(command.gather)
                self._outbox.expect(command.durable)
                self._spills.put(command)
            case Touch():
                self._spills.put(command)
            case Lookup():
                own = own_positions(command.first, len(command.hashes), self._lane, self._num_lanes)
                self._nothing[command.op] = 1 + (own[0] if own else len(command.hashes))
                self._outbox.expect(command.op)
                self._inbox.put(command)
            case Reload():
                own = own_positions(command.first, len(command.hashes), self._lane, self._num_lanes)
                self._outbox.expect(command.op)
                self.reads.open(command.op, own, len(command.hashes))
                self._inbox.put(command)
            case Drain():
                self._outbox.expect(command.op)
                self.reads.drain(command.reload, command.op)
            case ClearDisk():
                self._outbox.expect(command.op)
                self._inbox.put(command)

    def poll(self) -> list[Completion]:
        """The completions since the last call."""
        done = self._outbox.take()
        if self._nothing:
            for completion in done:
                self._nothing.pop(completion.op, None)
        return done

    def report_now(self, op: OpId) -> int:
        """A look-up's or reload's answer at its deadline: 1 + n by what is verified by now.

        No read of it begins any more, and `poll` does not bring it again.
        """
        settled = self.reads.settle_now(op)
        try:
            answered = self._outbox.revoke(op)
        except KeyError:  # its thread stands between taking it off and answering: too late for this tick
            answered = None
        nothing = self._nothing.pop(op, 1)
        if settled is not None:
            return settled
        return nothing if answered is None else answered

    def stats(self) -> DiskStats:
        """Counters since start and gauges of the moment."""
        counts, ledger = self._counts, self._keeper.ledger
        return DiskStats(
            rank=self._rank,
            path=str(self.slab.path),
            direct=self.slab.direct,
            slots_total=ledger.pool.num_slots,
            slots_used=ledger.num_used,
            slots_retired=ledger.num_retired,
            slot_bytes=self.slab.slot_bytes,
            staging_total=self._staging.num_buffers,
            staging_used=self._staging.num_buffers - self._staging.num_free,
            write_queue=self._writes.qsize(),
            read_queue=self.reads.num_waiting,
            spilled_pages=counts["spilled_pages"],
            spilled_bytes=counts["spilled_bytes"],
            reloaded_pages=counts["reloaded_pages"],
            reloaded_bytes=counts["reloaded_bytes"],
            duplicate_pages=counts["duplicate_pages"],
            collected_pages=counts["collected_pages"],
            index_commits=ledger.num_commits,
            write_errors=counts["write_errors"],
            read_failures=counts.faults(),
            us_per_page_read=counts.us_per_page_read,
            failed_spills=counts["failed_spills"],
            out_of_service=self._service.reason,
            last_error=counts.last_error,
        )

    @property
    def us_per_page_read(self) -> int:
        """Recent time a page while reading, in microseconds; 0: nothing read yet."""
        return self._counts.us_per_page_read

    def close(self, finish_by_s: float) -> bool:
        """Make durable what was submitted, save the ages and close, within `finish_by_s` seconds from now.

        Reads that wait are dropped. What a hanging disk keeps from ending is left behind, with a line in the log; then
        the answer is False, and the folder must stay locked until the process ends.
        """
        if self._stopping.is_set():
            return True
        self._stopping.set()
        until = time.monotonic() + finish_by_s
        self.reads.close()
        self._spills.put(Finish(self._clock() + finish_by_s))
        until += _LINGER_S
        self._join("keeper", until)
        self._drop_writes()
        until = min(until, time.monotonic() + _LINGER_S)  # what hangs now is worth no more time
        for _ in range(self._num_writers):
            self._writes.put(None)
        self._syncs.put(None)
        for name in self._threads:
            self._join(name, until)
        hanging = sorted(name for name, thread in self._threads.items() if thread.is_alive())
        if "keeper" not in hanging:
            self._floor.index.close()
        if hanging:
            logger.warning("%s: not closed, the disk keeps these waiting: %s", self.slab.path, ", ".join(hanging))
        else:
            self._floor.close()
        return not hanging

    def check(self) -> None:
        """The books agree: map, pool, order of collecting, staging. For a store that is closed. Raises ValueError."""
        keeper, staging = self._keeper, self._staging
        keeper.ledger.check()
        if not (keeper.broken or keeper.num_writing) and staging.num_free != staging.num_buffers:
            raise ValueError(f"{staging.num_buffers - staging.num_free} of {staging.num_buffers} buffers are missing")

    def _make_keeper(self, floor: RankFloor, config: DiskConfig) -> Keeper:
        ledger = Ledger(
            floor.slab,
            floor.index,
            floor.pool,
            floor.live,
            floor.foreign,
            floor.next_age,
            collect_start=config.collect_start,
            collect_stop=config.collect_stop,
        )
        errors = ErrorLog(str(floor.slab.path), self._counts, self._clock)
        parts = Parts(
            self._inbox,
            self._writes,
            self._syncs,
            self.reads,
            self._outbox,
            self._staging,
            self._service,
            self._counts,
            errors,
        )
        return Keeper(
            ledger,
            parts,
            lane=self._lane,
            num_lanes=self._num_lanes,
            slot_bytes=floor.slab.slot_bytes,
            clock=self._clock,
        )

    def _start_threads(self, frames: FrameSource, stored: list[tuple[Hash, int]]) -> dict[str, threading.Thread]:
        post = self._inbox.put
        gatherer = Gatherer(self._lane, self._num_lanes, frames, self._staging, self._outbox, post)
        bodies: dict[str, Callable[[], object]] = {
            "keeper": self._keeper.run,
            "gatherer": lambda: gatherer.run(self._spills),
            "syncer": lambda: sync_groups(self._syncs, self.slab, post),
        }
        for i in range(self._num_writers):
            bodies[f"writer {i}"] = lambda: write_pages(self._writes, self.slab, self._geometry, self.reads, post)
            bodies[f"reader {i}"] = Reader(self.reads, frames, self._geometry, self._counts, post, self._clock).run
        if stored:
            bodies["header check"] = lambda: check_headers(stored, self.slab, self.reads, post, self._stopping.wait)
        threads = {
            name: threading.Thread(target=self._guard, args=(name, body), name=f"disk {self._rank} {name}", daemon=True)
            for name, body in bodies.items()
        }
        for thread in threads.values():
            thread.start()
        return threads

    def _guard(self, name: str, body: Callable[[], object]) -> None:
        """Run a thread's body; a body that raises is begun again, and the disk takes no more writes."""
        while True:
            try:
                body()
            except Exception as error:
                logger.exception("%s: the thread %r met an error", self.slab.path, name)
                self._inbox.put(ThreadError(f"the thread {name!r} met {error!r}"))
                if self._stopping.is_set() or name == "header check":
                    return
            else:
                return

    def _join(self, name: str, until: float) -> None:
        self._threads[name].join(max(0.0, until - time.monotonic()))

    def _drop_writes(self) -> None:
        """Forget writes that have not begun: the keeper has ended, so nobody would make them durable."""
        try:
            while True:
                self._writes.get_nowait()
        except Empty:
            pass
