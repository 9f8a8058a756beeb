"""Which of the faults that ranks report is the one to tell. Pure: the caller brings the clock.

When a rank ends, every other one loses it in an exchange and fails, too: a fault that only follows. So a follower's
word waits for the fault that came first: a process that ended by itself, a failure of another kind, or silence (which
`liveness` finds).
"""

from benthic.messages import Failed
from benthic.server.engine_process import describe_exit, name_of

LAST_WORDS_S = 0.5  # between a process's exit and our verdict: its message may still be in the socket


class Verdict:
    """Owns what is known of the ranks' ends."""

    def __init__(self, num_ranks: int, follow_s: float) -> None:
        self._num_ranks = num_ranks
        self._follow_s = follow_s
        self._failed = ""  # the first failure with a cause of its own
        self._followed: dict[int, tuple[float, str]] = {}  # by rank: when it lost another, and its words
        self._exits: dict[int, tuple[float, str]] = {}  # by rank: when its process ended, and how

    def failed(self, message: Failed, now: float) -> None:
        """A rank has said why it can't go on."""
        words = self._named(message)
        if message.follows:
            self._followed.setdefault(message.rank, (now, words))
        else:
            self._failed = self._failed or words

    def exited(self, rank: int, status: int, last_tick: str, now: float) -> None:
        """A rank's process has ended and nobody had asked it to."""
        ended = f"{name_of(rank, self._num_ranks)} ended unexpectedly ({describe_exit(status)}){last_tick}"
        self._exits.setdefault(rank, (now, ended))

    @property
    def failure(self) -> str:
        """What a rank said when it could not go on, or nothing."""
        return self._failed or next((words for _, words in self._followed.values()), "")

    def told(self, now: float) -> str | None:
        """The cause to name, once there is no reason to wait for a better one."""
        if self._failed:
            return self._failed
        own = [end for rank, end in self._exits.items() if rank not in self._followed]
        if own and (first := min(own))[0] + LAST_WORDS_S <= now:
            return first[1]
        if self._followed:
            at, words = min(self._followed.values())
            if at + self._wait_s() <= now:
                return words
        return None

    def next_look(self) -> float | None:
        """When `told` may change by time alone; None: it won't."""
        own = [at for rank, (at, _) in self._exits.items() if rank not in self._followed]
        looks = [at + LAST_WORDS_S for at in own]
        looks += [at + self._wait_s() for at, _ in self._followed.values()]
        return min(looks, default=None)

    def _wait_s(self) -> float:
        """A first cause can still come as long as one rank has not said that it only follows."""
        return self._follow_s if len(self._followed) < self._num_ranks else LAST_WORDS_S

    def _named(self, message: Failed) -> str:
        name = f"rank {message.rank}"
        if self._num_ranks == 1 or message.message.startswith(name):
            return message.message
        return f"{name}: {message.message}"
