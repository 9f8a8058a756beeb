"""A long random trace of calls on one core, the same for a seed in any process; prints a digest after every tick.

`python -m tests.support.cache_trace OWNERS SEED TICKS`
"""

import random
import sys

from benthic.kvcache import CacheCore, CoreConfig, PageRun
from tests.support.naive_cache import hashes_of


def digests(owners: int, seed: int, ticks: int) -> list[str]:
    """The core's digest and its answers after each tick. At the end nothing may have leaked."""
    rng = random.Random(seed)
    core = CacheCore(CoreConfig(num_owners=owners, l1_pages=240 // owners, l1_free_pages=16 // owners))
    running: dict[int, tuple[PageRun, list[bytes]]] = {}
    lines = []
    for tick in range(ticks):
        core.begin_tick(tick)
        core.evict_to_watermark()
        answers: list[object] = [core.counters.evicted_l1]
        if len(running) < 6:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
            hashes = hashes_of(tuple(prompt + [prompt[-1]] * rng.randint(0, 60)))
            running[tick] = (core.open(tick, hashes, len(hashes) - 1), hashes)
        for seq_id in list(running):
            run, hashes = running[seq_id]
            if len(run.pages) == run.num_cached:
                answers.append(core.adopt(run, hashes, len(hashes) - 1))
            pages = min(rng.randint(1, 24), len(hashes) - len(run.pages))
            answers += [core.has_room(run, pages, 2), core.allocate(run, pages)]
            answers.append(core.commit(run, hashes[run.num_cached : len(run.pages)]))
            if run.num_cached == len(hashes) or rng.random() < 0.1:
                core.close(run)
                del running[seq_id]
        if rng.random() < 0.02:
            answers.append(core.flush())
        lines.append(f"{core.digest().hex()} {answers}")
    for run, _ in running.values():
        core.close(run)
    core.flush()
    core.check()
    lines.append(f"{core.lanes()} {core.counters.evicted_l1}")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(digests(*map(int, sys.argv[1:4]))) + "\n")
