"""The cache core: what each call promises, refusals, hysteresis, equal digests in processes that hash differently."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benthic.kvcache import CacheCore, CoreConfig, Found, InvariantError, PageRun
from benthic.kvcache.flush import Flushed
from tests.support.cache_trace import digests
from tests.support.naive_cache import hashes_of

ROOT = Path(__file__).resolve().parents[2]
PROMPT = hashes_of(tuple(range(100, 150)))  # 50 pages


def core_of(*, owners: int = 1, pages: int = 64, low: int = 0) -> CacheCore:
    return CacheCore(CoreConfig(num_owners=owners, l1_pages=pages, l1_free_pages=low))


def serve(core: CacheCore, seq_id: int, hashes: list[bytes]) -> PageRun:
    """A sequence with all its pages computed and committed."""
    run = core.open(seq_id, hashes, len(hashes))
    assert core.allocate(run, len(hashes) - run.num_cached)
    core.commit(run, hashes[run.num_cached :])
    core.check()
    return run


def evict(core: CacheCore) -> int:
    """Background eviction; gives pages."""
    before = core.counters.evicted_l1
    core.evict_to_watermark()
    return core.counters.evicted_l1 - before


def free(core: CacheCore) -> list[int]:
    return [lane.free for lane in core.lanes()]


def test_a_later_sequence_finds_the_pages_of_an_earlier_one() -> None:
    core = core_of(owners=4, pages=20)
    first = serve(core, 1, PROMPT)
    pages = list(first.pages)
    core.close(first)
    second = core.open(2, PROMPT, 49)  # a whole-prompt hit leaves the last page to be computed
    assert (second.num_cached, second.pages) == (49, pages[:49])
    assert core.allocate(second, 1)
    assert second.pages[49] != pages[49]
    assert core.commit(second, PROMPT[49:]) == [(49, pages[49])]
    assert second.pages == pages
    core.close(second)
    core.check()
    assert sum(free(core)) == 80 - 50


def test_probe_changes_nothing() -> None:
    core = core_of()
    core.close(serve(core, 1, PROMPT))
    before = core.digest()
    assert [core.probe(PROMPT, n) for n in (0, 1, 33, 50, 99)] == [Found(n, n) for n in (0, 1, 33, 50, 50)]
    assert core.digest() == before


def test_a_waiting_sequence_adopts_what_another_has_computed_meanwhile() -> None:
    core = core_of(owners=2)
    first = core.open(1, PROMPT, 49)
    waiting = core.open(2, PROMPT, 49)
    assert core.allocate(first, 40)
    core.commit(first, PROMPT[:35])
    assert core.adopt(waiting, PROMPT, 20) == 20
    assert core.adopt(waiting, PROMPT, 49) == 15
    assert core.adopt(waiting, PROMPT, 49) == 0
    assert waiting.pages == first.pages[:35]
    core.check()
    assert core.allocate(waiting, 1)
    with pytest.raises(InvariantError, match="adopts pages while it has 1 private"):
        core.adopt(waiting, PROMPT, 49)


def test_a_split_below_a_running_sequence_leaves_it_its_path() -> None:
    core = core_of()
    run = serve(core, 1, PROMPT[:30])
    other = serve(core, 2, PROMPT[:10] + hashes_of((1, 2, 3)))
    core.check()
    assert (run.num_cached, other.pages[:10]) == (30, run.pages[:10])
    assert [lane.locked for lane in core.lanes()] == [33]
    core.close(run)
    core.check()
    assert [(lane.cached, lane.locked) for lane in core.lanes()] == [(33, 13)]


def test_allocation_evicts_what_is_short_and_no_running_sequences_pages() -> None:
    core = core_of(pages=64)
    kept = serve(core, 1, hashes_of((1,) * 16))
    core.close(serve(core, 2, hashes_of((2,) * 16)))
    core.close(serve(core, 3, hashes_of((3,) * 16)))
    run = core.open(4, PROMPT, 0)
    assert core.allocate(run, 16)
    assert core.counters.evicted_l1 == 0
    assert core.allocate(run, 1)
    assert core.counters.evicted_l1 == 16
    assert core.probe(hashes_of((2,) * 16), 16).end == 0  # the older one
    assert core.probe(hashes_of((1,) * 16), 16).in_l1 == kept.num_cached


def test_a_refused_allocation_changes_nothing() -> None:
    core = core_of(owners=2, pages=16)
    serve(core, 1, PROMPT[:20])
    core.close(serve(core, 2, hashes_of((2,) * 6)))
    run = core.open(3, hashes_of((3,) * 30), 30)
    before = core.digest()
    assert [core.has_room(run, n, 0) for n in (12, 13)] == [True, False]
    assert [core.has_room(run, n, 2) for n in (8, 9)] == [True, False]
    assert not core.allocate(run, 13)
    assert core.digest() == before
    assert core.allocate(run, 12)


def test_the_watermark_counts_in_lanes_that_the_allocation_does_not_touch() -> None:
    core = core_of(owners=2, pages=4)
    run = core.open(1, PROMPT, 0)
    assert core.allocate(run, 7)  # 4 pages of lane 0, 3 of lane 1
    assert core.has_room(run, 0, 0)
    assert not core.has_room(run, 0, 1)


def test_background_eviction_refills_beyond_the_watermark_and_then_rests() -> None:
    core = core_of(pages=640, low=40)
    for seq_id in range(19):
        core.close(serve(core, seq_id, hashes_of((seq_id,) * 32)))
    assert free(core) == [32]
    assert evict(core) == 32
    assert free(core) == [64]  # at least 40 + 20
    run = core.open(99, PROMPT, 0)
    assert core.allocate(run, 24)
    assert evict(core) == 0  # 40 are left
    assert core.allocate(run, 1)
    assert evict(core) == 32


def test_background_eviction_takes_what_there_is() -> None:
    core = core_of(pages=40, low=30)
    serve(core, 1, PROMPT[:20])
    core.close(serve(core, 2, hashes_of((2,) * 4)))
    assert evict(core) == 4
    assert evict(core) == 0
    assert free(core) == [20]


def test_flush_drops_all_but_what_runs_and_says_so() -> None:
    core = core_of(owners=2)
    run = serve(core, 1, PROMPT[:30])
    core.close(serve(core, 2, PROMPT[:50]))
    core.close(serve(core, 3, hashes_of((3,) * 40)))
    assert core.flush(["l1"]) == Flushed({"l1": 60}, {"l1": 30})
    core.check()
    assert core.flush(["l1"]) == Flushed({"l1": 0}, {"l1": 30})
    assert core.probe(PROMPT, 50).end == 30
    core.close(run)
    assert core.flush() == Flushed({"l1": 30, "l2": 0}, {"l1": 0, "l2": 0})
    assert free(core) == [64, 64]
    assert core.counters.evicted_l1 == 0


def test_private_pages_are_freed_and_cached_ones_stay_when_a_sequence_ends() -> None:
    core = core_of(pages=16)
    run = core.open(1, PROMPT, 0)
    assert core.allocate(run, 10)
    core.commit(run, PROMPT[:4])
    assert [(lane.private, lane.locked) for lane in core.lanes()] == [(6, 4)]
    core.close(run)
    core.check()
    assert [(lane.free, lane.cached, lane.private, lane.locked) for lane in core.lanes()] == [(12, 4, 0, 0)]


def test_misuse_is_loud() -> None:
    core = core_of()
    run = core.open(1, PROMPT, 0)
    with pytest.raises(InvariantError, match="1 is open already"):
        core.open(1, PROMPT, 0)
    with pytest.raises(InvariantError, match="1 pages committed, 0 private"):
        core.commit(run, PROMPT[:1])
    core.close(run)
    for call in (lambda: core.close(run), lambda: core.allocate(run, 1), lambda: core.commit(run, [])):
        with pytest.raises(InvariantError, match="1 is not open"):
            call()
    core.begin_tick(5)
    with pytest.raises(ValueError, match="goes back from 5 to 4"):
        core.begin_tick(4)


@pytest.mark.parametrize(("owners", "pages", "low"), [(0, 8, 0), (1, 0, 0), (1, 8, 9), (1, 8, -1)])
def test_sizes_that_cannot_be_are_refused(owners: int, pages: int, low: int) -> None:
    with pytest.raises(ValueError, match=r"owner|watermark"):
        core_of(owners=owners, pages=pages, low=low)


def test_whatever_decides_is_in_the_digest() -> None:
    def served(tick: int, hashes: list[bytes]) -> bytes:
        core = core_of()
        core.begin_tick(tick)
        core.close(serve(core, 1, hashes))
        return core.digest()

    assert served(1, PROMPT) == served(1, PROMPT)
    assert len({served(1, PROMPT), served(2, PROMPT), served(1, PROMPT[:-1]), core_of().digest()}) == 4


@pytest.mark.parametrize("owners", [1, 2, 4, 8])
def test_a_long_trace_leaks_nothing_and_evicts(owners: int) -> None:
    lines = digests(owners, 3, 250)
    assert lines == digests(owners, 3, 250)
    assert lines[-1].count("cached=0, private=0, locked=0") == owners
    assert int(lines[-1].split()[-1]) > 100


@pytest.mark.multirank
def test_cores_in_processes_that_hash_differently_have_equal_digests() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-m", "tests.support.cache_trace", "4", "5", "250"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for hash_seed in ("0", "1", "4242")
    ]
    assert outputs[0] == outputs[1] == outputs[2] == digests(4, 5, 250)
