"""The one thread that changes map, index and slot pool: it hears of everything in one queue and decides in its order.

A spilled page's way: staged → (slot taken) → written → synced with its group → committed → in the map, answered. A
group closes when 64 MiB are written, when 20 ms have gone by since its first write, or when no other write is under
way. Whatever else goes wrong, every operation gets its answer: after an unforeseen error the keeper changes nothing any
more and refuses what comes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from benthic.common.units import MIB
from benthic.kvcache.commands import DONE, FAILED, ClearDisk, Lookup, OpId, Reload, Touch
from benthic.tiers.disk.format import Verdict
from benthic.tiers.disk.jobs import (
    BadHeader,
    BadRead,
    Finish,
    Hash,
    Message,
    PageRead,
    PageWrite,
    Place,
    SpillOp,
    Staged,
    StagedPage,
    Synced,
    ThreadError,
    Wrote,
    own_positions,
)
from benthic.tiers.disk.ledger import Ledger
from benthic.tiers.disk.outbox import Outbox
from benthic.tiers.disk.read_queue import ReadQueue
from benthic.tiers.disk.retire import Service, spoils_slot
from benthic.tiers.disk.staging import Staging
from benthic.tiers.disk.stats import Counts, ErrorLog, read_fault

logger = logging.getLogger(__name__)

GROUP_BYTES = 64 * MIB
GROUP_S = 0.020
DELETE_WITHIN_S = 1.0  # an entry to be deleted waits no longer for a commit that takes it along
SAVE_AGES_EVERY_S = 60.0


@dataclass(frozen=True)
class Parts:
    """What a keeper works with and others share."""

    inbox: "SimpleQueue[Message]"
    writes: "SimpleQueue[PageWrite | None]"
    syncs: "SimpleQueue[list[PageWrite] | None]"
    reads: ReadQueue
    outbox: Outbox
    staging: Staging
    service: Service
    counts: Counts
    errors: ErrorLog


class Keeper:
    """Owns the ledger and the pages between staging and map. `run` is the body of its thread."""

    def __init__(
        self,
        ledger: Ledger,
        parts: Parts,
        *,
        lane: int,
        num_lanes: int,
        slot_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.ledger = ledger
        self.broken = False
        self._parts = parts
        self._lane = lane
        self._num_lanes = num_lanes
        self._slot_bytes = slot_bytes
        self._clock = clock
        self._writing: dict[Hash, PageWrite] = {}  # have a slot, not yet durable
        self._written: list[PageWrite] = []  # of these, those to be synced with the next group
        self._oldest_written_s = 0.0
        self._syncing = False
        self._delete_at_s: float | None = None
        self._save_ages_at_s = clock() + SAVE_AGES_EVERY_S
        self._finish: Finish | None = None

    @property
    def num_writing(self) -> int:
        """Pages on their way to the disk."""
        return len(self._writing)

    def run(self) -> None:
        """Serve until `Finish`: then until all that was submitted is durable, or its time is up."""
        while not self._ended():
            message: Message | None
            try:
                message = self._parts.inbox.get(timeout=self._patience())
            except Empty:
                message = None
            try:
                if message is not None:
                    self._refuse(message) if self.broken else self._handle(message)
                message = None  # answered for: an error below is not its own
                if not self.broken:
                    self._keep_time()
            except Exception as error:  # the thread must go on: whoever waits for it would wait for ever
                logger.exception("the disk floor's keeper met an error; it stores nothing from here on")
                self._break(f"internal error {error!r}")
                if message is not None:
                    self._refuse(message)
        if not self.broken:
            self._save_all()

    # --- one message

    def _handle(self, message: Message) -> None:
        match message:
            case Staged():
                self._store(message)
            case Wrote():
                self._note_written(message)
            case Synced():
                self._publish(message)
            case Lookup():
                self._look_up(message)
            case Reload():
                self._plan_reads(message)
            case _:
                self._handle_rarer(message)

    def _handle_rarer(self, message: BadRead | BadHeader | Touch | ClearDisk | Finish | ThreadError) -> None:
        match message:
            case BadRead():
                self._drop(message.read.hash, message.read.place, message.fault)
                self._parts.reads.judged(message.op)
            case BadHeader():
                self._drop(message.hash, message.place, message.fault)
            case Touch():
                self._touch(message)
            case ClearDisk():
                self._clear(message)
            case Finish():
                self._finish = message
            case ThreadError():
                self._parts.service.take_out(message.what)
                self._parts.errors.say("thread", message.what)

    def _refuse(self, message: Message) -> None:
        """Answer without touching the ledger, which can't be trusted any more."""
        match message:
            case Staged():  # buffers stay taken from here on, so that gathers fail at once
                self._parts.outbox.answer(message.durable, FAILED)
            case Lookup():
                own = own_positions(message.first, len(message.hashes), self._lane, self._num_lanes)
                self._parts.outbox.answer(message.op, 1 + (own[0] if own else len(message.hashes)))
            case Reload():
                own = own_positions(message.first, len(message.hashes), self._lane, self._num_lanes)
                self._parts.reads.plan(message.op, (), own[0] if own else None)
            case BadRead():
                self._parts.reads.judged(message.op)
            case ClearDisk():
                self._parts.outbox.answer(message.op, DONE)
            case Finish():
                self._finish = message
            case Wrote() | Synced() | Touch() | BadHeader() | ThreadError():
                pass

    def _break(self, why: str) -> None:
        self.broken = True
        self._parts.service.take_out(why)
        self._parts.errors.say("keeper", why)
        writing, self._writing, self._written = self._writing, {}, []
        for write in writing.values():
            for spill in write.waiters:
                self._parts.outbox.answer(spill.durable, FAILED)

    # --- spill

    def _store(self, staged: Staged) -> None:
        self.ledger.touch([page.hash for page in staged.pages], staged.age)  # before a collection meets them
        wanted = self._not_yet_here(staged)
        if wanted and not self._parts.service.admits(self._clock()):
            self._fail_spill(staged.durable, staged.pages)
            return
        if wanted:
            self._make_room(len(wanted))
            wanted = self._not_yet_here(staged)  # in a small pool the collection may have taken some nevertheless
        slots = self.ledger.reserve(len(wanted))
        if slots is None:
            self._parts.errors.say("spill", f"no slot for {len(wanted)} pages, {self.ledger.pool.num_free} are free")
            self._fail_spill(staged.durable, staged.pages)
            return
        slots.reverse()  # taken from the end, so that writes run upwards
        spill = SpillOp(staged.durable)
        for page in staged.pages:
            if page.hash in wanted:
                wanted.remove(page.hash)
                write = PageWrite(page, slots.pop(), staged.age, [spill])
                self._writing[page.hash] = write
                spill.outstanding += 1
                self._parts.writes.put(write)
            else:
                self._parts.staging.give(page.buffer)
                self._join(page.hash, spill, staged.age)
        if not spill.outstanding:
            self._parts.outbox.answer(spill.durable, DONE)

    def _join(self, page: Hash, spill: SpillOp, age: int) -> None:
        """The page is durable or on its way: this spill is answered with the first."""
        self._parts.counts.add("duplicate_pages")
        first = self._writing.get(page)
        if first is not None:
            first.age = max(first.age, age)
            if spill not in first.waiters:
                first.waiters.append(spill)
                spill.outstanding += 1

    def _not_yet_here(self, staged: Staged) -> set[Hash]:
        return {p.hash for p in staged.pages if not self.ledger.holds(p.hash) and p.hash not in self._writing}

    def _make_room(self, need: int) -> None:
        try:
            self._parts.counts.add("collected_pages", self.ledger.make_room(need))
        except OSError as error:
            self._note_error("index commit of a collection", error)

    def _note_written(self, wrote: Wrote) -> None:
        write, error = wrote.write, wrote.error
        self._parts.staging.give(write.page.buffer)
        if error is not None:
            self._note_error(f"write of slot {write.slot}", error)
            self.ledger.give_up(write, spoiled=spoils_slot(error))
            self._settle(write, ok=False)
            return
        if write.doubtful:
            self._abandon([write])
            return
        if not self._written:
            self._oldest_written_s = self._clock()
        self._written.append(write)

    def _publish(self, synced: Synced) -> None:
        self._syncing = False
        if synced.error is not None:
            self._note_error("sync of the slab", synced.error)
            self._distrust(synced.group)
            return
        self._close_group_if_due()  # the next sync runs beside this commit
        try:
            self.ledger.commit(synced.group)
        except OSError as error:
            self._note_error("index commit of a group", error)
        else:
            self._parts.service.note_success()
            self._parts.counts.add("spilled_pages", len(synced.group))
            self._parts.counts.add("spilled_bytes", len(synced.group) * self._slot_bytes)
        for write in synced.group:
            self._settle(write, ok=self.ledger.holds(write.page.hash))

    def _distrust(self, group: Sequence[PageWrite]) -> None:
        """A sync has failed. Linux reports that once and marks the pages clean, which may be any that was written by
        then, so a later sync would vouch for bytes that never left: what is under way fails with the group."""
        written, self._written = self._written, []
        self._abandon([*group, *written])
        for write in self._writing.values():
            write.doubtful = True

    def _abandon(self, writes: Sequence[PageWrite]) -> None:
        for write in writes:
            self.ledger.give_up(write, spoiled=False)
            self._settle(write, ok=False)

    def _settle(self, write: PageWrite, *, ok: bool) -> None:
        del self._writing[write.page.hash]
        for spill in write.waiters:
            spill.outstanding -= 1
            spill.failed |= not ok
            if not spill.outstanding:
                self._parts.outbox.answer(spill.durable, FAILED if spill.failed else DONE)

    def _fail_spill(self, durable: OpId, pages: Sequence[StagedPage]) -> None:
        for page in pages:
            self._parts.staging.give(page.buffer)
        self._parts.counts.add("failed_spills")
        self._parts.outbox.answer(durable, FAILED)

    # --- look-up, reload, and what else comes

    def _look_up(self, lookup: Lookup) -> None:
        own = own_positions(lookup.first, len(lookup.hashes), self._lane, self._num_lanes)
        missing = self.ledger.first_missing(lookup.hashes, own)
        self._parts.outbox.answer(lookup.op, 1 + (len(lookup.hashes) if missing is None else missing))

    def _plan_reads(self, reload: Reload) -> None:
        reads: list[PageRead] = []
        missing = None
        for i in own_positions(reload.first, len(reload.hashes), self._lane, self._num_lanes):
            place = self.ledger.find(reload.hashes[i])
            if place is None:
                missing = i
                break
            reads.append(PageRead(reload.hashes[i], place, i, reload.frames[i]))
        self._parts.reads.plan(reload.op, reads, missing)

    def _drop(self, page: Hash, place: Place, fault: Verdict | OSError) -> None:
        if not self.ledger.drop(page, place, spoiled=isinstance(fault, OSError) and spoils_slot(fault)):
            self._parts.counts.add_fault("overtaken")
            return
        self._parts.counts.add_fault(read_fault(fault))
        what = f"read of slot {place.slot} of {place.slab.path.name}"
        self._parts.errors.say(what, fault if isinstance(fault, OSError) else f"{fault.value}; the page is dropped")

    def _touch(self, touch: Touch) -> None:
        self.ledger.touch(touch.hashes, touch.age)
        for page in touch.hashes if self._writing else ():
            write = self._writing.get(page)
            if write is not None:
                write.age = max(write.age, touch.age)

    def _clear(self, clear: ClearDisk) -> None:
        try:
            self.ledger.clear()
        except OSError as error:
            self._note_error("index commit of a clear", error)
            self.ledger.leave_all()  # never found again; their slots are free when the index can be written
        self._parts.outbox.answer(clear.op, DONE)

    # --- time

    def _patience(self) -> float:
        now = self._clock()
        ends = [self._save_ages_at_s]
        if self._written and not self._syncing:
            ends.append(self._oldest_written_s + GROUP_S)
        if self._delete_at_s is not None:
            ends.append(self._delete_at_s)
        if self._finish is not None:
            ends.append(self._finish.until_s)
        return max(0.0, min(ends) - now)

    def _keep_time(self) -> None:
        now = self._clock()
        self._close_group_if_due()
        if not self.ledger.num_leaving:
            self._delete_at_s = None
        elif self._delete_at_s is None:
            self._delete_at_s = now + DELETE_WITHIN_S
        elif now >= self._delete_at_s:
            self._delete_at_s = now + DELETE_WITHIN_S
            self._commit_deletes()
        if now >= self._save_ages_at_s:
            self._save_ages(now)

    def _close_group_if_due(self) -> None:
        """Hand what is written to the syncer, unless it is at work: then the group goes on growing."""
        if not self._written or self._syncing:
            return
        full = len(self._written) * self._slot_bytes >= GROUP_BYTES
        last = len(self._written) == len(self._writing)  # nothing is under way that could join it
        if full or last or self._finish or self._clock() >= self._oldest_written_s + GROUP_S:
            self._syncing = True
            group, self._written = self._written, []
            self._parts.syncs.put(group)

    def _commit_deletes(self) -> None:
        try:
            self.ledger.commit(())
        except OSError as error:
            self._note_error("index commit of deletes", error)

    def _save_ages(self, now: float) -> None:
        """A commit's worth of ages, and the next worth after a pause, so that look-ups come in between."""
        self._save_ages_at_s = now + SAVE_AGES_EVERY_S
        if not self.ledger.num_unsaved:
            return
        try:
            self.ledger.save_ages()
        except OSError as error:
            self._note_error("index commit of ages", error)
            return
        if self.ledger.num_unsaved:
            self._save_ages_at_s = now + GROUP_S

    def _ended(self) -> bool:
        if self._finish is None:
            return False
        return not self._writing or self._clock() >= self._finish.until_s

    def _save_all(self) -> None:
        try:
            while self.ledger.num_unsaved:
                self.ledger.save_ages()
            self.ledger.commit(())
        except OSError as error:
            self._note_error("index commit at the end", error)

    def _note_error(self, what: str, error: OSError) -> None:
        self._parts.counts.add("write_errors")
        self._parts.service.note_error(error, self._clock())
        self._parts.errors.say(what, error)
