"""Free lists of the owner lanes of one tier.

Replicated: every rank keeps every lane's list, so each knows where any page lies on its owner without asking. Page i of
a sequence lives in lane `owner_of(i, num_owners)`; its number here is its index in that lane.
"""

from collections.abc import Sequence

from benthic.kvcache.errors import InvariantError


class Lane:
    """The free list of one lane, last in first out; owned by the core. Pages 0 … total - 1 are all free at first."""

    __slots__ = ("_free", "_live", "owner", "total")

    def __init__(self, owner: int, total: int) -> None:
        self.owner = owner
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # the end is handed out first
        self._live = bytearray(total)  # 1: handed out

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_list(self) -> Sequence[int]:
        """The free pages, next to be handed out last. For digests and checks; not to be changed."""
        return self._free

    def is_live(self, page: int) -> bool:
        """Whether the page is handed out."""
        return bool(self._live[page])

    def reserve(self, num_pages: int) -> list[int]:
        """Take pages off the free list. Raises InvariantError if there are too few, or if one is live already."""
        free = self._free
        left = len(free) - num_pages
        if left < 0:
            raise InvariantError(f"lane {self.owner}: {num_pages} pages asked for, {len(free)} free")
        taken = free[left:]
        del free[left:]
        taken.reverse()
        live = self._live
        for page in taken:
            if live[page]:
                raise InvariantError(f"lane {self.owner}: page {page} is reserved while it is live")
            live[page] = 1
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises InvariantError for a page that is free already or does not exist."""
        live = self._live
        total = self.total
        for page in pages:
            if not 0 <= page < total:
                raise InvariantError(f"lane {self.owner}: page {page} is freed but the lane has pages 0 … {total - 1}")
            if not live[page]:
                raise InvariantError(f"lane {self.owner}: page {page} is freed twice")
            live[page] = 0
        self._free.extend(pages)

    def check(self) -> None:
        """The free list and the live marks say the same, and no page is listed twice."""
        if len(set(self._free)) != len(self._free):
            raise InvariantError(f"lane {self.owner}: a page is in the free list twice")
        if any(self._live[page] for page in self._free) or sum(self._live) + len(self._free) != self.total:
            raise InvariantError(f"lane {self.owner}: the free list and the live marks differ")


class Lanes:
    """The lanes of one tier; pages of a sequence go to them in turn."""

    __slots__ = ("_lanes", "num_owners")

    def __init__(self, num_owners: int, pages_per_lane: int) -> None:
        self.num_owners = num_owners
        self._lanes = [Lane(owner, pages_per_lane) for owner in range(num_owners)]

    def __getitem__(self, owner: int) -> Lane:
        return self._lanes[owner]

    def free(self) -> list[int]:
        """Free pages of each lane."""
        return [lane.num_free for lane in self._lanes]

    def reserve(self, first_page: int, num_pages: int) -> list[int]:
        """One page for each of the sequence's pages `first_page …`, each of its owner's lane.

        Raises InvariantError when a lane has too few: callers compare with `free()` first.
        """
        n = self.num_owners
        if n == 1:
            return self._lanes[0].reserve(num_pages)
        pages = [0] * num_pages
        for offset in range(min(n, num_pages)):  # the pages at offset, offset + n, … have one owner
            share = (num_pages - offset + n - 1) // n
            pages[offset::n] = self._lanes[(first_page + offset) % n].reserve(share)
        return pages

    def release(self, first_page: int, pages: Sequence[int]) -> None:
        """Give back the pages of the sequence's pages `first_page …`. Raises InvariantError as `Lane.release`."""
        n = self.num_owners
        if n == 1:
            self._lanes[0].release(pages)
            return
        for offset in range(min(n, len(pages))):
            self._lanes[(first_page + offset) % n].release(pages[offset::n])

    def check(self) -> None:
        """Every lane is consistent."""
        for lane in self._lanes:
            lane.check()
