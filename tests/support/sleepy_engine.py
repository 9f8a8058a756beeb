"""`python -m tests.support.sleepy_engine SEED [--alone RANK]`: the real engine process, whose copy threads and disk
sleep at random, on every rank at other times and in other moods.

`--alone`: on this rank the core is told what the rank's own workers have finished, not what all ranks have. A planted
fault: such a rank parts from the others as soon as one of them is slower.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from benthic.engine import core
from benthic.engine.process import run_rank
from benthic.kvcache import Agreed, MinReduce, OpId, agree
from benthic.messages.start import decode_start
from benthic.tiers.disk.staging import StagingBuffer
from benthic.tiers.host import cpu_copies
from benthic.tiers.host.progress import Mark
from tests.support.faulty_disk import Call, FaultyDisk

MOST_S = {  # the longest mean of a mood, by what sleeps
    "preadv": 0.003,
    "pwritev": 0.01,
    "fdatasync": 0.03,
    "before_commit": 0.02,
    "gather": 0.002,
    "backup": 0.02,
    "load_back": 0.01,
}
MOODS = 300.0  # the longest mean over the shortest
MOOD_S = 1.0
NIGHT, NIGHT_S = 1 / 200, 0.5  # so seldom it sleeps much longer: past the deadline of a read


class Sleeper:
    """When one rank's workers sleep, and how long. Any number of threads."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed = f"{seed}/{rank}"
        self._dice = random.Random(self._seed)

    def sleep(self, what: str) -> None:
        """One call of a worker."""
        time.sleep(self._seconds(what))

    def fault(self, call: Call) -> None:
        """For FaultyDisk: sleeps, fails nothing."""
        if call.name in MOST_S:
            self.sleep(call.name)

    def _seconds(self, what: str) -> float:
        dice = self._dice
        if dice.random() < NIGHT:
            return dice.uniform(0.0, NIGHT_S)
        mood = random.Random(f"{self._seed}/{what}/{int(time.monotonic() / MOOD_S)}").random()
        mean = MOST_S[what] * float(MOODS**-mood)
        return min(10 * mean, dice.expovariate(1 / mean))


@contextmanager
def sleepy_copies(sleeper: Sleeper) -> Iterator[None]:
    """Copies between L1 and L2, and from L2 to the disk's buffers, sleep before they copy."""

    class SleepyMover(cpu_copies.CpuMover):
        def backup(self, pages: Sequence[int], frames: Sequence[int], layers: range, after: Mark) -> Mark:
            sleeper.sleep("backup")
            return super().backup(pages, frames, layers, after)

        def load_back(self, frames: Sequence[int], pages: Sequence[int], layers: range, after: Mark) -> Mark:
            sleeper.sleep("load_back")
            return super().load_back(frames, pages, layers, after)

    fill = StagingBuffer.fill

    def sleepy_fill(self: StagingBuffer, frame: memoryview) -> None:
        sleeper.sleep("gather")
        fill(self, frame)

    with patch.object(cpu_copies, "CpuMover", SleepyMover), patch.object(StagingBuffer, "fill", sleepy_fill):
        yield


def agree_alone(
    windows: Sequence[Sequence[OpId]], seen: Mapping[OpId, int], min_reduce: MinReduce
) -> tuple[Agreed, ...]:
    """What this rank alone has seen; it takes part in the exchange all the same, or the others would wait."""
    agree(windows, seen, min_reduce)
    return agree(windows, seen, lambda values: values)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--alone", type=int, default=-1)
    arguments = parser.parse_args()
    order = decode_start(sys.stdin.buffer.readline())
    sleeper = Sleeper(arguments.seed, order.rank)
    with ExitStack() as patches:
        patches.enter_context(sleepy_copies(sleeper))
        if order.rank == arguments.alone:
            patches.enter_context(patch.object(core, "agree", agree_alone))
        return run_rank(order, lifeline=True, disk_io=FaultyDisk(sleeper.fault))


if __name__ == "__main__":
    sys.exit(main())
