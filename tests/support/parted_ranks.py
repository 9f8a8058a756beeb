"""Ranks of which one decides by what it alone knows, and how they notice.

Each fault is one that a careless change could bring into the core or around it.
"""

import re
from collections.abc import Sequence
from functools import cache

from benthic.kvcache import Agreed, InvariantError, OpId, agree, assert_same_state
from benthic.kvcache.commands import COUNTS
from benthic.parallel.control import Control, GroupControl
from tests.support.cache_ranks import Answer, Rank, Request, Scenario, Summary, run_in_step


class Eager(Rank):
    """Takes an operation for over as soon as its own worker has reported it."""

    def agreed(self, windows: Sequence[Sequence[OpId]], least: list[int]) -> tuple[Agreed, ...]:
        return agree(windows, self.reported, lambda mine: mine)


class OwnCount(Rank):
    """Waits for the others, but takes as many pages as it found itself."""

    def agreed(self, windows: Sequence[Sequence[OpId]], least: list[int]) -> tuple[Agreed, ...]:
        counts = {op for stream in COUNTS for op in windows[stream]}
        return tuple(
            Agreed(end.op, self.reported[end.op]) if end.op in counts else end for end in super().agreed(windows, least)
        )


class Busy(Rank):
    """Asks for nothing from the disk while its own worker has much to do."""

    def hold(self, request: Request) -> None:
        if len(self.worker.jobs) + len(self.worker.lookups) < 3:
            super().hold(request)


FAULTS: dict[str, type[Rank]] = {"eager": Eager, "own count": OwnCount, "busy": Busy}


def rank_of(rank: int, scenario: Scenario, fault: str = "") -> Rank:
    """The last rank has the fault, if there is one."""
    kind = FAULTS[fault] if fault and rank == len(scenario.lanes) - 1 else Rank
    return kind(rank, scenario)


@cache
def parted_at(scenario: Scenario, fault: str) -> int:
    """The first tick, from 1, in which the digests of such ranks differ; 0: in none."""
    try:
        run_in_step([rank_of(rank, scenario, fault).turns() for rank in range(len(scenario.lanes))])
    except AssertionError as error:
        found = re.fullmatch(r"tick (\d+): the cores have parted", str(error).splitlines()[0])
        if found is None:
            raise
        return int(found[1])
    return 0


def live(control: Control, scenario: Scenario, fault: str = "") -> Summary | str:
    """A rank's life among others, its state compared with theirs in every tick, as an engine does where it is asked to.

    Gives what the comparison has raised, if it has.
    """
    turns = rank_of(control.rank, scenario, fault).turns()
    answer: Answer = next(turns)
    tick = 0
    while True:
        tick += 1
        vector, digest = answer
        try:
            assert_same_state(tick, bytes.fromhex(digest), control.min_reduce)
        except InvariantError as error:
            return str(error)
        least = list(control.min_reduce(vector)) if vector else []  # replicated, now that the states are equal
        try:
            answer = turns.send(least)
        except StopIteration as end:
            return dict(end.value)


def live_over_gloo(scenario: Scenario, fault: str = "") -> Summary | str:
    """`live` in a process that is a rank."""
    return live(GroupControl(), scenario, fault)
