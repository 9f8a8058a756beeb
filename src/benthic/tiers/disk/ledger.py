"""What is where: the map, the index and the slot pool, changed by the keeper's thread alone.

The rules that keep a slot from ever having two owners:
- a page enters the map when its index entry is durable, and that is committed after its data;
- a page that leaves takes its entry along with a later commit, and its slot is free when that commit is durable.
"""

from array import array
from collections.abc import Iterable, Sequence

from benthic.tiers.disk.collect import AgeOrder, num_to_collect
from benthic.tiers.disk.index import Entry, SlotIndex
from benthic.tiers.disk.jobs import Hash, PageWrite, Place
from benthic.tiers.disk.slab import Slab
from benthic.tiers.disk.slots import SlotPool

AGES_A_COMMIT = 4096  # ages that one commit saves, so that look-ups do not wait long behind it


class Ledger:
    """Map, index, pool and order of collecting; every method may be called by the keeper's thread only."""

    def __init__(
        self,
        slab: Slab,
        index: SlotIndex,
        pool: SlotPool,
        live: dict[Hash, Entry],
        foreign: dict[Hash, tuple[Slab, Entry]],
        next_age: int,
        *,
        collect_start: float,
        collect_stop: float,
    ) -> None:
        self.slab = slab
        self.pool = pool
        self.num_commits = 0
        self._index = index
        self._pages = live
        self._foreign = dict(foreign)
        self._base_age = next_age  # the core's ages begin anew with every start; on disk they go on
        self._start = collect_start
        self._stop = collect_stop
        self._order = AgeOrder.of((page, entry.position, entry.age) for page, entry in live.items())
        self._generations = array("Q", bytes(8 * pool.num_slots))
        self._leaving: dict[Hash, list[int]] = {}  # slots whose entries are to be deleted
        self._num_leaving_slots = 0
        self._unsaved: dict[Hash, None] = {}  # touched since their age was saved
        self._bad_slots: set[int] = set()  # leaving, and not to be used again

    @property
    def num_pages(self) -> int:
        """Pages in this rank's own file."""
        return len(self._pages)

    @property
    def num_used(self) -> int:
        """Slots with a page or being written."""
        return self.pool.num_taken - self._num_leaving_slots

    @property
    def num_retired(self) -> int:
        """Slots that are not used again."""
        return self.pool.num_retired + len(self._bad_slots)

    @property
    def num_leaving(self) -> int:
        """Pages whose deletion is not durable yet."""
        return len(self._leaving)

    @property
    def num_unsaved(self) -> int:
        """Pages with an age that is not saved yet."""
        return len(self._unsaved)

    def holds(self, page: Hash) -> bool:
        """Whether the page is durable in this rank's own file."""
        return page in self._pages

    def find(self, page: Hash) -> Place | None:
        """Where the page can be read, in any file of the host."""
        entry = self._pages.get(page)
        if entry is not None:
            return Place(self.slab, entry.slot, self._generations[entry.slot])
        if self._foreign and (found := self._foreign.get(page)) is not None:
            return Place(found[0], found[1].slot, -1)
        return None

    def first_missing(self, hashes: Sequence[Hash], positions: range) -> int | None:
        """The first of `positions` whose page is on no file; None where all are."""
        pages, foreign = self._pages, self._foreign
        for i in positions:
            if hashes[i] not in pages and hashes[i] not in foreign:
                return i
        return None

    def make_room(self, need: int) -> int:
        """Collect before `need` slots are taken, if the slab is full enough; returns how many pages went.

        Raises OSError where their deletes can't be made durable: they are gone from the map, their slots stay taken
        until a later commit.
        """
        count = num_to_collect(
            usable=self.pool.num_slots - self.pool.num_retired,
            used=self.num_used,
            need=need,
            start=self._start,
            stop=self._stop,
        )
        for page, _ in self._order.oldest(count):
            self._leave(page, self._pages[page])
        if count or self.pool.num_free < need:
            self.commit(())
        return count

    def reserve(self, count: int) -> list[int] | None:
        """Slots for `count` pages, or None and nothing taken."""
        if self.pool.num_free < count:
            return None
        slots = []
        for _ in range(count):
            slot = self.pool.take()
            assert slot is not None, "the pool has fewer free slots than it says"
            self._generations[slot] += 1
            slots.append(slot)
        return slots

    def give_up(self, write: PageWrite, *, spoiled: bool) -> None:
        """A write has failed before its entry was committed; a `spoiled` slot is not used again."""
        if spoiled:
            self.pool.retire(write.slot)
        else:
            self.pool.give(write.slot)

    def commit(self, writes: Sequence[PageWrite]) -> None:
        """Publish pages whose data are durable, and delete what has left, in one transaction.

        Raises OSError: then the pages have left again, and their slots are free with the next commit that succeeds.
        """
        puts = [(w.page.hash, Entry(w.slot, w.page.position, self.on_disk_age(w.age))) for w in writes]
        if not puts and not self._leaving:
            return
        try:
            self._index.apply(puts, list(self._leaving))
        except OSError:
            for write in writes:  # part of it may be stored, where there are several files
                self._let_go(write.page.hash, write.slot)
            raise
        self.num_commits += 1
        for page, entry in puts:
            self._pages[page] = entry
            self._order.add(page, entry.position, entry.age)
            self._foreign.pop(page, None)
        self._free_leaving()

    def drop(self, page: Hash, place: Place, *, spoiled: bool) -> bool:
        """Take a page off the map if it still lies there; False: the reader was overtaken.

        Its entry goes with the next commit, its slot then is free or, `spoiled`, not used again.
        """
        if place.generation < 0:
            return self._foreign.pop(page, None) is not None
        entry = self._pages.get(page)
        if entry is None or entry.slot != place.slot or self._generations[entry.slot] != place.generation:
            return False
        self._order.remove(page, entry.age)
        self._leave(page, entry)
        if spoiled:
            self._bad_slots.add(entry.slot)
        return True

    def touch(self, hashes: Iterable[Hash], age: int) -> None:
        """These pages are as old as `age`, a number of this run; what is not in the own file is passed over."""
        age = self.on_disk_age(age)
        for page in hashes:
            entry = self._pages.get(page)
            if entry is not None and entry.age < age:
                self._order.remove(page, entry.age)
                self._order.add(page, entry.position, age)
                self._pages[page] = Entry(entry.slot, entry.position, age)
                self._unsaved[page] = None

    def on_disk_age(self, age: int) -> int:
        """The age of this run's admission `age`, behind those of all earlier runs."""
        return self._base_age + age

    def save_ages(self) -> None:
        """Save some of the ages that touches have changed; `num_unsaved` says whether any are left. Raises OSError."""
        some = [page for page, _ in zip(self._unsaved, range(AGES_A_COMMIT), strict=False)]
        self._index.apply([(page, self._pages[page]) for page in some], list(self._leaving))
        self.num_commits += 1
        for page in some:
            del self._unsaved[page]
        self._free_leaving()

    def clear(self) -> None:
        """Empty the index durably, then the rest; no write may be under way. OSError: the books are as before."""
        self._index.clear()
        self.num_commits += 1
        for entry in self._pages.values():
            self._generations[entry.slot] += 1
            self._free(entry.slot)
        self._free_leaving()
        self._pages.clear()
        self._foreign.clear()
        self._unsaved.clear()
        self._order = AgeOrder()

    def leave_all(self) -> None:
        """Forget every page at once; the index and the slots follow with the next commit that succeeds."""
        for page, entry in list(self._pages.items()):
            self._leave(page, entry)
        self._foreign.clear()
        self._order = AgeOrder()

    def check(self) -> None:
        """Slots of pages, leaving pages and free ones are apart; the order knows each page. Raises ValueError."""
        self.pool.check()
        taken = [entry.slot for entry in self._pages.values()] + [s for slots in self._leaving.values() for s in slots]
        if len(set(taken)) != len(taken):
            raise ValueError("a slot has two owners")
        if any(self.pool.is_free(slot) for slot in taken):
            raise ValueError("a slot with a page is free")
        if len(self._order) != len(self._pages):
            raise ValueError(f"the order of collecting has {len(self._order)} pages, the map {len(self._pages)}")

    def _leave(self, page: Hash, entry: Entry) -> None:
        del self._pages[page]
        self._unsaved.pop(page, None)
        self._generations[entry.slot] += 1
        self._let_go(page, entry.slot)

    def _let_go(self, page: Hash, slot: int) -> None:
        self._leaving.setdefault(page, []).append(slot)
        self._num_leaving_slots += 1

    def _free_leaving(self) -> None:
        for slots in self._leaving.values():
            for slot in slots:
                self._free(slot)
        self._leaving.clear()
        self._num_leaving_slots = 0

    def _free(self, slot: int) -> None:
        if slot in self._bad_slots:
            self._bad_slots.remove(slot)
            self.pool.retire(slot)
        else:
            self.pool.give(slot)
