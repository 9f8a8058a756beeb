"""Map, index and pool against a naive model, with index commits that fail at random: no slot ever has two owners."""

import errno
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benthic.tiers.disk.index import Entry
from benthic.tiers.disk.jobs import PageWrite, StagedPage
from benthic.tiers.disk.ledger import Ledger
from benthic.tiers.disk.slots import SlotPool

SLOTS = 12
BASE_AGE = 100
_PAGES = st.integers(0, 20)


def _hash(page: int) -> bytes:
    return bytes([page]) * 32


class _Index:
    """An index in memory: a commit that fails may have done everything, nothing, or a part, as with several files."""

    def __init__(self) -> None:
        self.stored: dict[bytes, Entry] = {}
        self.fail_with = ""  # "", "nothing", "puts" or "all"

    def apply(self, puts: Sequence[tuple[bytes, Entry]], deletes: Sequence[bytes]) -> None:
        if self.fail_with != "nothing":
            self.stored.update(puts)
        if self.fail_with in ("", "all"):
            for key in set(deletes) - {key for key, _ in puts}:
                self.stored.pop(key, None)
        if self.fail_with:
            raise OSError(errno.EIO, "injected")

    def clear(self) -> None:
        if self.fail_with:
            raise OSError(errno.EIO, "injected")
        self.stored.clear()


class LedgerMachine(RuleBasedStateMachine):
    """Pages are written, published, dropped, touched and collected; the model knows ages and what must be there."""

    @initialize()
    def begin(self) -> None:
        self.index = _Index()
        self.ledger = self._open()
        self.pages: dict[int, tuple[int, int]] = {}  # page → position, age
        self.writes: dict[int, PageWrite] = {}
        self.age = 0

    def _open(self) -> Ledger:
        live = dict(self.index.stored)
        pool = SlotPool.from_live(SLOTS, [entry.slot for entry in live.values()])
        slab: Any = object()  # only handed out
        index: Any = self.index
        return Ledger(slab, index, pool, live, {}, BASE_AGE, collect_start=0.9, collect_stop=0.85)

    @rule(fault=st.sampled_from(["", "", "", "nothing", "puts", "all"]))
    def set_fault(self, fault: str) -> None:
        self.index.fail_with = fault

    @rule(pages=st.sets(_PAGES, min_size=1, max_size=4))
    def take_slots(self, pages: set[int]) -> None:
        new = sorted(p for p in pages if not self.ledger.holds(_hash(p)) and p not in self.writes)
        before = dict(self.pages)
        try:
            collected = self.ledger.make_room(len(new))
        except OSError:
            collected = sum(not self.ledger.holds(_hash(page)) for page in before)
        else:
            if self.index.fail_with == "" and len(new) + len(self.writes) <= SLOTS - self.ledger.pool.num_retired:
                assert self.ledger.pool.num_free >= len(new)
        order = sorted(before, key=lambda page: (before[page][1], -before[page][0]))
        for page in order[:collected]:  # the oldest, and of these the last of their sequence
            assert not self.ledger.holds(_hash(page))
            del self.pages[page]
        slots = self.ledger.reserve(len(new))
        if slots is None:
            return
        self.age += 1
        for page, slot in zip(new, slots, strict=True):
            staged: Any = StagedPage(_hash(page), page, None)  # type: ignore[arg-type]  # nothing is written
            self.writes[page] = PageWrite(staged, slot, self.age)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), outcome=st.sampled_from(["commit", "commit", "give up", "spoil"]))
    def end_writes(self, data: st.DataObject, outcome: str) -> None:
        some = data.draw(st.sets(st.sampled_from(sorted(self.writes)), min_size=1))
        group = [self.writes.pop(page) for page in sorted(some)]
        if outcome != "commit":
            for write in group:
                self.ledger.give_up(write, spoiled=outcome == "spoil")
            return
        try:
            self.ledger.commit(group)
        except OSError:
            assert not any(self.ledger.holds(write.page.hash) for write in group)
        else:
            for write in group:
                self.pages[write.page.position] = (write.page.position, BASE_AGE + write.age)

    @rule(page=_PAGES, spoiled=st.booleans(), overtaken=st.booleans())
    def drop(self, page: int, spoiled: bool, overtaken: bool) -> None:
        place = self.ledger.find(_hash(page))
        assert (place is not None) == (page in self.pages)
        if place is None:
            return
        if overtaken:
            stale = type(place)(place.slab, place.slot, place.generation + 1)
            assert not self.ledger.drop(_hash(page), stale, spoiled=spoiled)
            return
        assert self.ledger.drop(_hash(page), place, spoiled=spoiled)
        assert not self.ledger.drop(_hash(page), place, spoiled=spoiled)
        del self.pages[page]

    @rule(pages=st.sets(_PAGES, max_size=6))
    def touch(self, pages: set[int]) -> None:
        self.age += 1
        self.ledger.touch([_hash(page) for page in sorted(pages)], self.age)
        for page in pages & set(self.pages):
            self.pages[page] = (page, BASE_AGE + self.age)

    @rule()
    def save(self) -> None:
        try:
            self.ledger.save_ages()
        except OSError:
            return
        assert self.ledger.num_unsaved == 0
        assert {key: entry.age for key, entry in self.index.stored.items()} == {
            _hash(page): age for page, (_, age) in self.pages.items()
        }

    @precondition(lambda self: not self.writes)
    @rule()
    def clear(self) -> None:
        try:
            self.ledger.clear()
        except OSError:
            return
        self.pages.clear()
        assert self.index.stored == {}
        assert self.ledger.pool.num_free == SLOTS - self.ledger.pool.num_retired

    @invariant()
    def no_slot_has_two_owners(self) -> None:
        self.ledger.check()
        assert {_hash(page) for page in self.pages} == {h for h in map(_hash, range(21)) if self.ledger.holds(h)}
        stored = self.index.stored
        assert len({entry.slot for entry in stored.values()}) == len(stored)
        for page in self.pages:  # what is in the map is durable
            place = self.ledger.find(_hash(page))
            assert place is not None
            assert stored[_hash(page)].slot == place.slot
        being_written = {write.slot for write in self.writes.values()}
        for entry in stored.values():  # what a restart would believe is neither free nor being written
            assert not self.ledger.pool.is_free(entry.slot)
            assert entry.slot not in being_written


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
