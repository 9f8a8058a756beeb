"""How far a step's forward or a load-back is, group of layers by group; the other thread waits here."""

import threading
from typing import Any

Mark = Any
"""A point in the work of a device's stream, which only the mover that made it understands."""


class StepFailed(Exception):
    """The forward did not write what the copy was to read."""


class Progress:
    """Groups of layers that are done, in order, each with the mark behind its work. One thread reports, others wait."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._changed = threading.Condition()
        self._marks: list[Mark] = []
        self._end: Mark = None
        self._over = False
        self._error: BaseException | None = None

    def reach(self, mark: Mark, num_groups: int | None = None) -> None:
        """The next group is done at `mark`; or the first `num_groups` are, of which some may have been before."""
        with self._changed:
            wanted = len(self._marks) + 1 if num_groups is None else num_groups
            self._marks += [mark] * (wanted - len(self._marks))
            assert len(self._marks) <= self._num_groups, "a layer was reported twice"
            self._changed.notify_all()

    def finish(self, mark: Mark) -> None:
        """All is done at `mark`, in every group that was not reported before."""
        with self._changed:
            self._marks += [mark] * (self._num_groups - len(self._marks))
            self._end, self._over = mark, True
            self._changed.notify_all()

    def fail(self, error: BaseException, mark: Mark = None) -> None:
        """Nothing more will come, and what did is over at `mark`. Groups that were reported stay so."""
        with self._changed:
            if not self._over:
                self._error, self._end, self._over = error, mark, True
                self._changed.notify_all()

    @property
    def over(self) -> bool:
        return self._over

    def wait(self, group: int) -> tuple[Mark, ...]:
        """The marks of `group` and of what follows it, as far as it is known; blocks until the first of them is.

        Raises what the work failed with before it came to this group.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._marks) > group or self._over)
            if len(self._marks) > group:
                return tuple(self._marks[group:])
            assert self._error is not None
            raise self._error

    def wait_for_end(self) -> Mark:
        """The mark behind everything, a failure too."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)
            return self._end
