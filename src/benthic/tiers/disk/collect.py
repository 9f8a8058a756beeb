"""Which pages leave the disk when it fills up: least recently admitted first, and a tail before its head.

Pages of one admission share its age, so a bucket of equal age is the unit of the order; inside a bucket the page that
stands later in its sequence goes first, because a tail is of no use without its head and a head is of use without it.
"""

import heapq
from collections.abc import Iterable

Hash = bytes

MOST_PER_ROUND = 256  # pages that one round collects: bounds how long the deletes of one index commit take


def num_to_collect(*, usable: int, used: int, need: int, start: float, stop: float, most: int = MOST_PER_ROUND) -> int:
    """How many pages to collect now, before `need` slots are taken.

    Nothing while the slots in use stay at or below the share `start` of the `usable` ones; beyond it, as many as bring
    them to the share `stop`, `most` at a time (more only where the slots would not do for `need`).
    """
    after = used + need
    if after <= start * usable:
        return 0
    least = max(0, after - usable)
    return min(used, max(least, min(most, after - int(stop * usable))))


class AgeOrder:
    """Every page on the disk, in the order of collecting. Owned by the keeper's thread."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[Hash, int]] = {}  # age → position of each page
        self._ages: list[int] = []  # heap; may name a bucket that has gone
        self._sorted: dict[int, list[Hash]] = {}  # age → pages, the next to go last; pages may have left the bucket

    @classmethod
    def of(cls, pages: Iterable[tuple[Hash, int, int]]) -> "AgeOrder":
        """The order of (hash, position, age)."""
        order = cls()
        for page, position, age in pages:
            order.add(page, position, age)
        return order

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, page: Hash, position: int, age: int) -> None:
        """Enter a page that is not here yet."""
        bucket = self._buckets.get(age)
        if bucket is None:
            bucket = self._buckets[age] = {}
            heapq.heappush(self._ages, age)
        bucket[page] = position
        if self._sorted:
            self._sorted.pop(age, None)

    def remove(self, page: Hash, age: int) -> None:
        """Take out a page that is here with this age."""
        bucket = self._buckets[age]
        del bucket[page]
        if not bucket:
            del self._buckets[age]
            self._sorted.pop(age, None)

    def oldest(self, count: int) -> list[tuple[Hash, int]]:
        """Take out up to `count` pages that go first: (hash, age)."""
        taken: list[tuple[Hash, int]] = []
        while len(taken) < count and self._buckets:
            age = self._ages[0]
            bucket = self._buckets.get(age)
            if bucket is None:
                heapq.heappop(self._ages)
                continue
            self._take_from(age, bucket, count, taken)
        return taken

    def _take_from(self, age: int, bucket: dict[Hash, int], count: int, taken: list[tuple[Hash, int]]) -> None:
        order = self._sorted.get(age)
        if order is None:  # sorted once a bucket, not once a round
            order = self._sorted[age] = sorted(bucket, key=lambda page: (bucket[page], page))
        while bucket and len(taken) < count:
            page = order.pop()
            if bucket.pop(page, None) is not None:
                taken.append((page, age))
        if not bucket:
            del self._buckets[age]
            del self._sorted[age]
