"""Which slots of a slab are free: an O(1) free list, rebuilt at every start from the live slots."""

from collections.abc import Iterable


class SlotPool:
    """The free list; owned by the one thread that changes map, index and pool.

    A slot is free, taken or retired. Low slots go out first while none has come back, so that a new file fills from its
    beginning. A free slot given back, a retired one or one out of range raises ValueError: that's a bug, and two pages
    would end in one slot.
    """

    __slots__ = ("_free", "_state", "num_retired", "num_slots")

    _FREE, _TAKEN, _RETIRED = 0, 1, 2

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_retired = 0
        self._free = list(range(num_slots - 1, -1, -1))  # the end goes out first
        self._state = bytearray(num_slots)

    @classmethod
    def from_live(cls, num_slots: int, live: Iterable[int]) -> "SlotPool":
        """A pool in which the slots `live` are taken. Raises ValueError if one is named twice or out of range."""
        pool = cls(num_slots)
        for slot in live:
            pool._check_range(slot)
            if pool._state[slot]:
                raise ValueError(f"slot {slot} has two owners")
            pool._state[slot] = cls._TAKEN
        pool._free = [slot for slot in pool._free if not pool._state[slot]]
        return pool

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return self.num_slots - self.num_retired - len(self._free)

    def is_free(self, slot: int) -> bool:
        """Whether the slot is in the free list."""
        return self._state[slot] == self._FREE

    def take(self) -> int | None:
        """A free slot, now taken; None if there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._state[slot] = self._TAKEN
        return slot

    def give(self, slot: int) -> None:
        """Put a taken slot back."""
        self._check_taken(slot)
        self._state[slot] = self._FREE
        self._free.append(slot)

    def retire(self, slot: int) -> None:
        """Never hand out a taken slot again: its disk blocks gave an error."""
        self._check_taken(slot)
        self._state[slot] = self._RETIRED
        self.num_retired += 1

    def check(self) -> None:
        """The free list and the states say the same, and no slot is listed twice. Raises ValueError."""
        free = set(self._free)
        if len(free) != len(self._free) or free != {s for s in range(self.num_slots) if self.is_free(s)}:
            raise ValueError("the free list and the slots' states differ")
        if self._state.count(self._RETIRED) != self.num_retired:
            raise ValueError("the count of retired slots is wrong")

    def _check_range(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} does not exist; the pool has slots 0 … {self.num_slots - 1}")

    def _check_taken(self, slot: int) -> None:
        self._check_range(slot)
        if self._state[slot] != self._TAKEN:
            raise ValueError(f"slot {slot} is given back but is {'free' if self.is_free(slot) else 'retired'}")
