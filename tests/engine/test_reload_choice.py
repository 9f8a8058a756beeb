"""A whole engine over a real floor chooses between reading and computing the first time that it has to."""

import time
from pathlib import Path

import numpy as np
import pytest

from benthic.engine.rates import PrefillRate
from tests.support.faulty_disk import Call, FaultyDisk
from tests.support.real_engine import RealEngine
from tests.support.tiny_checkpoint import PAGE_TOKENS, write_checkpoint

SAMPLE_TOKENS = 16 * PAGE_TOKENS
PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, 256, 60 * PAGE_TOKENS + 5)]
OPTIONS: dict[str, object] = {"l1_pages": 200, "l2_size": "8MiB", "l3_size": "32MiB", "max_context": 2048,
                              "max_running": 2, "chunk_tokens": 256}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def compute_rate(us_per_page: int) -> PrefillRate:
    """As if measured in a step longer than any that follows."""
    rate = PrefillRate()
    rate.measured(1_000_000, us_per_page / PAGE_TOKENS)
    return rate


def test_how_fast_it_computes_is_known_at_start_where_there_is_a_disk(folder: Path, tmp_path: Path) -> None:
    """A prefix on disk may come with the first request after a restart."""
    with RealEngine(folder, l3_dir=str(tmp_path), **OPTIONS) as engine:
        assert engine.engine._rate.us_per_page(PAGE_TOKENS) > 0
    with RealEngine(folder, l1_pages=200, max_context=2048) as engine:
        assert engine.engine._rate.us_per_page(PAGE_TOKENS) == 0


class SlowReads:
    """A fault that fails nothing: reads of pages wait."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def __call__(self, call: Call) -> None:
        if call.name == "preadv" and call.path.name == "slab-0.dat":
            time.sleep(self.delay_s)


def forget(engine: RealEngine) -> None:
    """Leave the prompt on the disk alone."""
    engine.flush("l1", "l2")
    assert engine.engine.state().disks[0].us_per_page_read == 0


def test_a_fast_disk_is_sampled_and_then_read(folder: Path, tmp_path: Path) -> None:
    with RealEngine(folder, l3_dir=str(tmp_path), **OPTIONS) as engine:
        (cold,) = engine.ask([PROMPT])
        forget(engine)
        engine.engine._rate = compute_rate(500_000)
        (told,) = engine.ask([PROMPT])
        assert (told.tokens, told.cached) == (cold.tokens, (0, 0, 60 * PAGE_TOKENS))
        state = engine.engine.state()
        assert (state.tiers.reloads, state.tiers.reload_pages, state.tiers.reload_timeouts) == (2, 60, 0)
        engine.flush("l1", "l2")
        (again,) = engine.ask([PROMPT])
        assert again == told
        assert engine.engine.state().tiers.reloads == 3, "with a known rate it is read in one piece"


@pytest.mark.parametrize(
    ("delay_s", "compute_us"),
    [(0.02, 500), (0.5, 5_000)],
    ids=["slower than computing", "so slow that the sample's time is up first"],
)
def test_a_slow_disk_is_sampled_and_then_computing_goes_on(
    folder: Path, tmp_path: Path, delay_s: float, compute_us: int
) -> None:
    reads = SlowReads(0.0)
    with RealEngine(folder, disk_io=FaultyDisk(reads), l3_dir=str(tmp_path), **OPTIONS) as engine:
        (cold,) = engine.ask([PROMPT])
        forget(engine)
        engine.engine._rate = compute_rate(compute_us)
        reads.delay_s = delay_s
        (told,) = engine.ask([PROMPT])
        assert told.tokens == cold.tokens
        assert told.cached[:2] == (0, 0)
        assert told.cached[2] <= SAMPLE_TOKENS
        assert engine.engine.state().tiers.reloads == 1
        reads.delay_s = 0.0
