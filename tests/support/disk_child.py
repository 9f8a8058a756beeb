"""A process that spills, touches, reloads and clears at random on a folder until it is killed.

    python -m tests.support.disk_child FOLDER SEED SLOTS PAGES

What it does goes to its standard output, a line an event, each written before the next step: `ready`, `durable PAGE…`
(these are acknowledged), `touched PAGE…` (their age may or may not be saved), `clearing`, `cleared`.
"""

import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benthic.kvcache.commands import DONE
from tests.support.disk_store import Driver, config_for

SPILLS_AT_ONCE = 3
PAGES_A_SPILL = 6


def say(event: str, pages: Iterable[int] = ()) -> None:
    """One line, in one write."""
    os.write(1, " ".join([event, *map(str, pages)]).encode() + b"\n")


def work(driver: Driver, rng: random.Random, num_pages: int) -> None:
    """One round of spills side by side, and perhaps something else."""
    running: dict[int, range] = {}
    for place in range(SPILLS_AT_ONCE):
        first = rng.randrange(num_pages - PAGES_A_SPILL)
        pages = range(first, first + rng.randint(1, PAGES_A_SPILL))
        say("touched", pages)  # a page that is there already becomes younger, acknowledged or not
        _, durable = driver.begin_spill(pages, first=first, frame=place * PAGES_A_SPILL)
        running[durable] = pages
    while running:
        for op in [op for op in running if op in driver.poll()]:
            assert driver.wait([op]) == [DONE]
            say("durable", running.pop(op))
        time.sleep(0.0002)
    kind = rng.random()
    first = rng.randrange(num_pages - 10)
    if kind < 0.1:
        say("touched", range(first, first + 10))
        driver.touch(range(first, first + 10))
    elif kind < 0.3:
        driver.reload(range(first, first + 10), first=first, frame=100)
    elif kind < 0.33:
        say("clearing")
        driver.clear()
        say("cleared")


def main() -> None:
    """Run until killed."""
    folder, seed, slots, num_pages = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    driver = Driver(config_for(folder, slots))
    say("ready")
    rng = random.Random(seed)
    while True:
        work(driver, rng, num_pages)


if __name__ == "__main__":
    main()
