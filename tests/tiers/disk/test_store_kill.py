"""Kill -9 at random points of spills, collections and clears: what was acknowledged is there, and no byte is wrong."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benthic.tiers.disk.io import SystemDisk
from benthic.tiers.disk.survey import namespaces, verify
from tests.support.disk_child import PAGES_A_SPILL, SPILLS_AT_ONCE
from tests.support.disk_store import config_for, read_everything

ROOT = Path(__file__).parents[3]
SLOTS = 120
PAGES = 400
LOSSES = SPILLS_AT_ONCE * PAGES_A_SPILL  # what may be in flight


class _Expectation:
    """What must be on the disk, from the child's lines: pages in the order in which they were acknowledged."""

    def __init__(self) -> None:
        self.order: dict[int, int] = {}  # page → number of its acknowledgement
        self.uncertain: set[int] = set()  # used again since: how old the disk thinks they are is unknown
        self._number = 0
        self._there: set[int] = set()  # on the disk at the last start, acknowledged or not

    def hear(self, line: str) -> None:
        event, *words = line.split()
        if event == "clearing":
            self.order.clear()  # a clear in progress may have happened
            self.uncertain.clear()
            self._there.clear()
        for page in map(int, words):
            if page in self.order:
                self.uncertain.add(page)
            elif event == "durable":
                self._number += 1
                self.order[page] = self._number
                if page in self._there:  # an earlier run has written it, and died before it could say so
                    self.uncertain.add(page)

    def check(self, found: set[int]) -> None:
        """What is missing was collected, so what is left is newer, and the slab is about as full as it may be."""
        missing = set(self.order) - found
        if missing:
            assert len(found) >= int(0.85 * SLOTS) - LOSSES, f"{len(found)} pages are left, {len(missing)} are missing"
            newest = max((self.order[page] for page in missing - self.uncertain), default=0)
            # Acknowledgements come in groups, so those of spills side by side may stand in another order than the ages.
            older = [page for page in found & set(self.order) if self.order[page] < newest - 2 * LOSSES]
            assert set(older) <= self.uncertain, f"older pages than the missing ones are left: {older}"
        for page in missing:
            del self.order[page]
            self.uncertain.discard(page)
        self._there = found


def _run_and_kill(folder: Path, seed: int, after_s: float) -> list[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.disk_child", str(folder), str(seed), str(SLOTS), str(PAGES)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert child.stdout is not None
    with child.stdout:
        ready = child.stdout.readline()
        time.sleep(after_s)
        child.kill()
        lines = child.stdout.read().splitlines(keepends=True)
    child.wait()
    assert (ready, child.returncode) == ("ready\n", -9)
    return [line for line in lines if line.endswith("\n")]


def _kill_again_and_again(folder: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    expectation = _Expectation()
    acknowledged = 0
    for number in range(rounds):
        lines = _run_and_kill(folder, seed * 1000 + number, rng.uniform(0.0, 0.5))
        acknowledged += sum(line.startswith("durable") for line in lines)
        for line in lines:
            expectation.hear(line)
        (survey,) = namespaces(folder)
        assert list(verify(survey, SystemDisk(), lambda done, total: None)) == []
        expectation.check(read_everything(config_for(folder, SLOTS), range(PAGES)))
    assert acknowledged > 2 * rounds


def test_killed_ten_times(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, rounds=12, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_two_hundred_times(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, rounds=220, seed=2)
