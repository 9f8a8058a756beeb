"""The disk store on real files: what goes in comes out, over restarts, collections and clears."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benthic.kvcache.commands import DONE, FAILED
from tests.support.disk_store import GEOMETRY, Driver, config_for, page_hash


def test_pages_come_back_after_a_restart(tmp_path: Path) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    assert driver.spill(range(20)) == DONE
    assert driver.lookup(range(25)) == 20
    assert driver.reload(range(25), frame=50) == 20
    driver.close()
    driver = Driver(config)
    assert driver.lookup(range(25)) == 20
    assert driver.reload(range(20), frame=50) == 20
    stats = driver.store.stats()
    assert (stats.slots_used, stats.reloaded_pages) == (20, 20)
    driver.close()


def test_a_page_on_disk_or_being_written_is_not_written_again(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100))
    first = driver.begin_spill(range(16))
    driver.wait([first[0]])
    second = driver.begin_spill(range(8, 24), first=8)
    assert driver.wait([*first, *second]) == [DONE] * 4
    assert driver.spill(range(24)) == DONE
    stats = driver.store.stats()
    assert stats.spilled_pages == 24
    assert stats.duplicate_pages == 8 + 24
    assert stats.slots_used == 24
    driver.close()


def test_a_page_on_disk_is_not_collected_for_the_rest_of_its_own_spill(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 20))
    assert driver.spill(range(6)) == DONE
    assert driver.spill(range(10, 21), first=10) == DONE
    assert driver.spill(range(5, 10), first=5) == DONE  # page 5, the oldest, is here; the rest needs room
    assert driver.store.stats().collected_pages > 0
    assert driver.held(range(5, 10)) == set(range(5, 10))
    driver.close()


def test_a_rank_carries_out_its_own_positions_alone(tmp_path: Path) -> None:
    config = config_for(tmp_path, 300)
    drivers = [Driver(config, rank=rank, num_ranks=3, num_owners=3) for rank in range(3)]
    for driver in drivers:
        assert driver.spill(range(10), first=5) == DONE
    assert [d.store.stats().spilled_pages for d in drivers] == [3, 3, 4]  # 5+i = 0, 1, 2 (mod 3)
    # Positions 10 and 11 are pages 15 and 16 of the sequence, of ranks 0 and 1; rank 2 has all of its own.
    assert [d.lookup(range(12), first=5) for d in drivers] == [10, 11, 12]
    for driver in drivers:
        driver.close()


def test_positions_are_those_of_the_operation(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100), rank=1, num_ranks=2, num_owners=2)
    assert driver.spill(range(6), first=2) == DONE  # own: pages 3 and 5 of the sequence at 1, 3, 5 of the operation
    assert driver.store.stats().spilled_pages == 3
    assert driver.lookup(range(7), first=2) == 7  # position 6 is the other rank's
    assert driver.lookup([0, 1, 2, 99, 4, 5], first=2) == 3
    assert driver.lookup([99], first=2) == 1
    driver.close()


def test_all_ranks_of_one_owner_keep_their_own_copy(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 200), rank=1, num_ranks=2, num_owners=1)
    assert driver.spill(range(6)) == DONE
    assert driver.reload(range(6), frame=20) == 6
    assert driver.store.stats().spilled_pages == 6
    driver.close()


def test_after_a_change_of_ranks_pages_are_found_in_any_file_and_move_to_their_owners(tmp_path: Path) -> None:
    config = config_for(tmp_path, 200)
    driver = Driver(config)
    assert driver.spill(range(20)) == DONE
    slots = {page: driver.floor.live[page_hash(page)].slot for page in range(20)}
    driver.close()
    driver = Driver(config, rank=1, num_ranks=2, num_owners=2, look_elsewhere=True)
    assert driver.lookup(range(20)) == 20
    assert driver.wait([driver.begin_reload(range(20), frame=40)]) == [21]
    assert all(driver.frames.holds(40 + page, page) for page in range(1, 20, 2))
    assert driver.spill(range(10)) == DONE  # not in its own file: written there
    assert (driver.store.stats().spilled_pages, driver.store.stats().duplicate_pages) == (5, 0)
    with next(tmp_path.rglob("slab-0.dat")).open("r+b") as file:  # the other owner reuses its slots
        for page in range(20):
            file.seek(slots[page] * GEOMETRY.slot_bytes)
            file.write(bytes(GEOMETRY.slot_bytes))
    assert driver.wait([driver.begin_reload(range(20), frame=40)]) == [1 + 11]
    assert driver.lookup(range(20)) == 11  # a stale copied entry is a miss and forgotten
    assert all(driver.frames.holds(40 + page, page) for page in range(1, 10, 2))
    assert driver.store.stats().slots_retired == 0
    driver.close()


def test_filling_twice_the_budget_keeps_the_newest_and_leaks_nothing(tmp_path: Path) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    for start in range(0, 200, 10):
        assert driver.spill(range(start, start + 10)) == DONE
    stats = driver.store.stats()
    held = driver.held(range(200))
    assert stats.slots_total == 100
    assert stats.slots_used == len(held) == 200 - stats.collected_pages
    assert 75 <= len(held) <= 90
    assert held >= set(range(200 - 70, 200))
    oldest = min(held) // 10 * 10
    kept = [page for page in range(oldest, oldest + 10) if page in held]
    assert kept == list(range(oldest, oldest + len(kept)))  # of the admission at the border, the head stays
    driver.close()
    driver = Driver(config)
    assert driver.held(range(200)) == held
    for page in sorted(held):
        assert driver.reload([page]) == 1
    driver.close()


def test_a_touched_head_outlives_untouched_tails_over_a_restart(tmp_path: Path) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    driver.spill(range(10))
    for tail in range(5):
        driver.spill(range(100 + 10 * tail, 110 + 10 * tail), first=10)
        driver.touch([*range(10), *range(100 + 10 * tail, 110 + 10 * tail)])
    driver.close()
    driver = Driver(config)  # ages go on: a new run's first admission is newer than all before
    for start in range(200, 260, 10):
        driver.spill(range(start, start + 10))
    held = driver.held(range(300))
    assert held >= set(range(200, 260))
    assert held & set(range(10)) == set(range(10))  # as new as the last tail
    assert not held & set(range(100, 110))
    driver.close()


def test_more_pages_than_slots_fail_softly_and_free_what_they_took(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 10))
    assert driver.spill(range(12)) == FAILED
    stats = driver.store.stats()
    assert (stats.slots_used, stats.staging_used, stats.failed_spills) == (0, 0, 1)
    assert "no slot" in stats.last_error
    assert driver.spill(range(5)) == DONE
    driver.close()


def test_more_frames_than_staging_buffers_fail_both_operations(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100, num_staging=4))
    ops = driver.begin_spill(range(5))
    assert driver.wait(ops) == [FAILED, FAILED]
    assert driver.spill(range(4)) == DONE
    driver.close()


def test_clear_empties_the_floor_for_good(tmp_path: Path) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    driver.spill(range(20))
    assert driver.clear() == DONE
    assert driver.held(range(20)) == set()
    assert driver.store.stats().slots_used == 0
    assert driver.spill(range(5)) == DONE
    driver.close()
    driver = Driver(config)
    assert driver.held(range(20)) == set(range(5))
    driver.close()


def test_a_drain_of_a_reload_at_rest_is_done_at_once(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100))
    driver.spill(range(4))
    reload = driver.begin_reload(range(4), frame=10)
    driver.wait([reload])
    assert driver.wait([driver.drain(reload), driver.drain(12345)]) == [DONE, DONE]
    driver.close()


def test_report_now_returns_an_answer_that_was_not_fetched(tmp_path: Path) -> None:
    driver = Driver(config_for(tmp_path, 100))
    driver.spill(range(4))
    reload = driver.begin_reload(range(4), frame=10)
    while driver.store.stats().reloaded_pages < 4 or driver.store.reads.num_running:  # counted first, then answered
        time.sleep(0.001)
    assert driver.store.report_now(reload) == 1 + 4
    assert reload not in driver.poll()
    assert driver.store.report_now(reload) == 1  # vouches for nothing where the answer is not its own any more
    driver.close()


def test_close_finishes_what_was_submitted(tmp_path: Path) -> None:
    config = config_for(tmp_path, 100)
    driver = Driver(config)
    driver.begin_spill(range(30))
    driver.touch(range(30))
    driver.close()
    with pytest.raises(RuntimeError, match="closed"):
        driver.begin_spill(range(3))
    driver = Driver(config)
    assert driver.held(range(30)) == set(range(30))
    driver.close()


class StoreMachine(RuleBasedStateMachine):
    """Random spills, touches, reloads, clears and restarts against a dictionary of pages with their ages."""

    folder: Path
    SLOTS = 20
    PAGES = 60

    @initialize()
    def begin(self) -> None:
        type(self).run_number = getattr(type(self), "run_number", 0) + 1
        self.config = config_for(self.folder / str(self.run_number), self.SLOTS, num_staging=8)
        self.config.disks[0].path.mkdir()
        self.driver = Driver(self.config)
        self.ages: dict[int, int] = {}
        self.clock = 0

    @rule(first=st.integers(0, PAGES - 6), count=st.integers(1, 6))
    def spill(self, first: int, count: int) -> None:
        pages = range(first, first + count)
        self.clock += 1
        assert self.driver.spill(pages, first=first) == DONE
        for page in pages:
            self.ages[page] = self.clock
        held = self.driver.held(self.ages)
        assert held >= set(pages)
        gone = [(self.ages[page], -page) for page in self.ages if page not in held]
        stay = [(self.ages[page], -page) for page in held - set(pages)]
        assert not gone or not stay or max(gone) < min(stay)  # what went was older, or later in its sequence
        self.ages = {page: self.ages[page] for page in held}

    @rule(first=st.integers(0, PAGES - 6), count=st.integers(1, 6))
    def touch(self, first: int, count: int) -> None:
        self.clock += 1
        self.driver.touch(range(first, first + count))
        for page in range(first, first + count):
            if page in self.ages:
                self.ages[page] = self.clock

    @rule(first=st.integers(0, PAGES - 8), count=st.integers(1, 8))
    def reload(self, first: int, count: int) -> None:
        pages = range(first, first + count)
        leading = next((i for i, page in enumerate(pages) if page not in self.ages), count)
        assert self.driver.lookup(pages, first=first) == leading
        assert self.driver.reload(pages, first=first, frame=100) == leading

    @rule()
    def restart(self) -> None:
        self.driver.close()
        self.driver = Driver(self.config)

    @rule()
    def clear(self) -> None:
        assert self.driver.clear() == DONE
        self.ages.clear()

    @invariant()
    def nothing_leaks(self) -> None:
        until = time.monotonic() + 10  # threads tidy up behind their answers
        while time.monotonic() < until:
            stats = self.driver.store.stats()
            if (stats.staging_used, stats.slots_used) == (0, len(self.ages)):
                break
            time.sleep(0.001)
        assert (stats.staging_used, stats.slots_used) == (0, len(self.ages))
        failures = {kind: count for kind, count in stats.read_failures.items() if count and kind != "overtaken"}
        assert not failures  # a page that was collected while its header was checked is no failure

    def teardown(self) -> None:
        self.driver.close()


def test_the_store_is_a_dictionary_with_a_bound(tmp_path: Path) -> None:
    machine = type("Machine", (StoreMachine,), {"folder": tmp_path})
    case = machine.TestCase
    case.settings = settings(
        max_examples=12, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
