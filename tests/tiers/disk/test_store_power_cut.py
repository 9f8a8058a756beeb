"""The order of syncs: after a power cut at any point of a recorded run, what was acknowledged is there, and only that.

A kill loses no page cache, so it can't show a missing sync; a trace of the I/O seam can.
"""

import random
from pathlib import Path

import pytest

from benthic.kvcache.commands import DONE
from benthic.tiers.disk.index import unpack_value
from tests.support.disk_store import GEOMETRY, Driver, config_for, read_everything, remove_tree
from tests.support.faulty_disk import Event, State, TracingDisk, build_state, power_cuts

PAGES = range(60)
SLOTS = 12


def _record(folder: Path) -> tuple[list[Event], list[frozenset[int]]]:
    """A run with spills, side by side too, collections, a restart and a clear; what the disk held after each step."""
    disk = TracingDisk()
    config = config_for(folder, SLOTS, num_staging=12)
    held = [frozenset[int]()]
    driver = Driver(config, io=disk)

    def note() -> None:
        held.append(frozenset(driver.held(PAGES)))
        disk.mark(len(held) - 1)

    def two_spills(one: range, other: range) -> None:
        ops = [*driver.begin_spill(one), *driver.begin_spill(other, frame=20)]
        assert driver.wait(ops) == [DONE] * 4
        note()

    two_spills(range(3), range(3, 5))
    driver.touch(range(2))
    two_spills(range(10, 14), range(14, 16))
    two_spills(range(20, 24), range(24, 25))
    driver.close()
    driver = Driver(config, io=disk)
    two_spills(range(30, 33), range(40, 44))
    assert driver.clear() == DONE
    note()
    two_spills(range(50, 53), range(10, 12))
    driver.close()
    return disk.trace, held


def _expected(state: State, held: list[frozenset[int]]) -> frozenset[int]:
    """What must be there: held after the last step that was over, and not dropped by the one in progress."""
    step = max((mark for mark in state.marks if isinstance(mark, int)), default=0)
    return held[step] & held[min(step + 1, len(held) - 1)]


def _check_cuts(memory_path: Path, per_point: int, stride: int, seed: int) -> int:
    (memory_path / "run").mkdir()
    trace, held = _record(memory_path / "run")
    assert any(held[i] - held[i + 1] for i in range(len(held) - 2)), "nothing was collected"
    rng = random.Random(seed)
    states = 0
    for number, state in enumerate(power_cuts(trace, rng, per_point=per_point)):
        if number % stride:
            continue
        folder = memory_path / f"cut-{number}"
        folder.mkdir()
        build_state(state, memory_path / "run", folder)
        found = read_everything(config_for(folder, SLOTS), PAGES)
        assert found >= _expected(state, held), f"cut {number}: lost after {state.marks[-1:]}"
        states += 1
        remove_tree(folder)
    return states


def test_a_power_cut_at_any_point_loses_nothing_acknowledged(memory_path: Path) -> None:
    assert _check_cuts(memory_path, per_point=1, stride=3, seed=1) > 50


def test_no_durable_entry_names_a_slot_that_is_written(tmp_path: Path) -> None:
    trace, _ = _record(tmp_path)
    index: dict[bytes, int] = {}
    writes = 0
    for event in trace:
        if event.kind == "committed" and event.commit is not None:
            if event.commit.clear:
                index.clear()
            for key in event.commit.deletes:
                index.pop(key, None)
            for key, value in event.commit.puts:
                entry = unpack_value(key, value)
                assert entry is not None
                index[key] = entry.slot
        elif event.kind == "write" and event.path.name == "slab-0.dat" and len(event.data) == GEOMETRY.slot_bytes:
            assert event.offset // GEOMETRY.slot_bytes not in index.values()
            writes += 1
    assert writes > 2 * SLOTS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_power_cuts_in_many_mixtures(memory_path: Path, seed: int) -> None:
    assert _check_cuts(memory_path, per_point=4, stride=1, seed=seed) > 500
