"""The simulated disk floor: which pages each lane's disk holds, collected by the disk tier's own rules, without I/O."""

from collections.abc import Sequence

from benthic.common.layout import owner_of
from benthic.tiers.disk.collect import AgeOrder, num_to_collect

COLLECT_START, COLLECT_STOP = 0.90, 0.85  # the defaults of the disk tier


class DiskLane:
    """One rank's pages on disk."""

    def __init__(self, capacity: int | None) -> None:
        """`capacity` in pages; None: no limit."""
        self.num_collected = 0
        self._capacity = capacity
        self._pages: dict[bytes, tuple[int, int]] = {}  # hash → (position, age)
        self._order = AgeOrder()

    def __contains__(self, page: bytes) -> bool:
        return page in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def write(self, pages: Sequence[tuple[bytes, int]], age: int) -> bool:
        """Store those of the (hash, position) that are not here yet; False: no room for all, and none is stored."""
        new = [(page, position) for page, position in pages if page not in self._pages]
        if self._capacity is not None:
            self._collect(len(new), self._capacity)
            if len(self._pages) + len(new) > self._capacity:
                return False
        for page, position in new:
            self._pages[page] = (position, age)
            self._order.add(page, position, age)
        return True

    def touch(self, page: bytes, age: int) -> None:
        """An admission has used the page."""
        entry = self._pages.get(page)
        if entry is not None and entry[1] < age:
            self._order.remove(page, entry[1])
            self._order.add(page, entry[0], age)
            self._pages[page] = (entry[0], age)

    def _collect(self, need: int, capacity: int) -> None:
        used = len(self._pages)
        count = num_to_collect(usable=capacity, used=used, need=need, start=COLLECT_START, stop=COLLECT_STOP)
        for page, _ in self._order.oldest(count):
            del self._pages[page]
        self.num_collected += count


class Floor:
    """All lanes' disks. A page lies on its owner's."""

    def __init__(self, num_owners: int, pages_per_lane: int | None) -> None:
        self.lanes = [DiskLane(pages_per_lane) for _ in range(num_owners)]

    @property
    def num_collected(self) -> int:
        """Pages collected since the start."""
        return sum(lane.num_collected for lane in self.lanes)

    @property
    def num_pages(self) -> int:
        """Pages on disk."""
        return sum(map(len, self.lanes))

    def write(self, hashes: Sequence[bytes], first: int, age: int) -> bool:
        """Store the pages `first …`; False where a lane has no room for its share."""
        shares: list[list[tuple[bytes, int]]] = [[] for _ in self.lanes]
        for position, page in enumerate(hashes, first):
            shares[owner_of(position, len(self.lanes))].append((page, position))
        stored = [lane.write(share, age) for lane, share in zip(self.lanes, shares, strict=True) if share]
        return all(stored)

    def num_leading(self, hashes: Sequence[bytes], first: int) -> int:
        """How many leading pages of `hashes`, which start at position `first`, are on disk."""
        for offset, page in enumerate(hashes):
            if page not in self.lanes[owner_of(first + offset, len(self.lanes))]:
                return offset
        return len(hashes)

    def touch(self, hashes: Sequence[bytes], first: int, age: int) -> None:
        """An admission has used these pages."""
        for position, page in enumerate(hashes, first):
            self.lanes[owner_of(position, len(self.lanes))].touch(page, age)
