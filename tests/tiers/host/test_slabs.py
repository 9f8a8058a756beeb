"""Slabs: frames at borders, lanes, capacity, names, what a killed process leaves."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benthic.common.errors import CapacityError, ConfigError
from benthic.common.units import GIB, MIB
from benthic.tiers.host import slabs as module
from benthic.tiers.host.faulting import allocate_and_touch, fault_in
from benthic.tiers.host.pools import HugepagePool, MemoryLimit, Mount, Room
from benthic.tiers.host.slabs import NAME_PREFIX, POISON, HostSlabs, SlabGeometry, remove_leftovers
from tests.support.fake_cuda import FakeCuda
from tests.support.host_pools import FakePools, small_slabs

FRAME = 12 * 1024


def geometry(**changes: int) -> SlabGeometry:
    values = {"frame_bytes": FRAME, "frames_per_lane": 10, "num_owners": 1, **changes}
    return SlabGeometry(**values)


@pytest.mark.parametrize("per_slab", [1, 3, 4, 9, 10, 1000])
def test_no_frame_straddles_slabs_and_each_keeps_its_own_bytes(per_slab: int, tmp_path: Path) -> None:
    slabs = small_slabs(tmp_path, FRAME, 10, per_slab=per_slab)
    assert slabs.plan.frames_per_slab == min(per_slab, 10)
    assert len(slabs.plan.slab_bytes) == -(-10 // min(per_slab, 10))
    for index in range(10):
        slabs.frame(index)[:] = bytes([index]) * FRAME
    for index in range(10):
        assert bytes(slabs.frame(index)) == bytes([index]) * FRAME
        assert slabs.frame_address(index) % 4096 == 0
    slabs.close()


def test_a_bound_that_is_no_multiple_of_the_frame_is_kept(tmp_path: Path) -> None:
    bound = 3 * FRAME + 5000
    slabs = HostSlabs.open(geometry(max_slab_bytes=bound), pools=FakePools(tmp_path))
    assert slabs.plan.slab_bytes == (3 * FRAME, 3 * FRAME, 3 * FRAME, FRAME)
    assert max(slabs.plan.slab_bytes) <= bound
    slabs.close()


def test_a_small_cache_stays_in_one_slab() -> None:
    assert geometry().plan(4096).slab_bytes == (10 * FRAME,)
    assert geometry().plan(2 * MIB).slab_bytes == (2 * MIB,)


def test_a_bound_below_one_frame_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"BENTHIC_MAX_SLAB_GIB=.*holds no frame of 12\.00 KiB; set it to at least"):
        geometry(max_slab_bytes=FRAME - 4096).plan(4096)
    with pytest.raises(ConfigError, match="holds no frame"):
        geometry(max_slab_bytes=MIB).plan(2 * MIB)


@pytest.mark.parametrize("per_slab", [2, 5, 100])
def test_ranks_map_the_same_memory_and_write_their_own_lanes(per_slab: int, tmp_path: Path) -> None:
    shape = geometry(num_owners=3, frames_per_lane=5, max_slab_bytes=per_slab * FRAME)
    ranks = [HostSlabs.create(shape, pools=FakePools(tmp_path))]
    ranks += [HostSlabs.attach(shape, ranks[0].segment, rank=rank) for rank in (1, 2)]
    ranks[0].unlink()
    assert list(tmp_path.iterdir()) == []
    for slabs in ranks:
        slabs.fault_in()
        for index in range(5):
            slabs.frame(index)[:] = bytes([10 * slabs.rank + index]) * FRAME
    for slabs in ranks:
        assert sum(span.num_bytes for span in slabs.spans()) == 5 * FRAME
        for index in range(5):
            assert set(bytes(slabs.frame(index))) == {10 * slabs.rank + index}
    everything = b"".join(bytes(view) for view in ranks[1]._views)
    assert [everything[n * FRAME] for n in range(15)] == [10 * r + i for r in range(3) for i in range(5)]
    for slabs in ranks:
        slabs.close()


def test_frames_outside_the_lane_and_absent_memory_are_refused(tmp_path: Path) -> None:
    slabs = HostSlabs.open(geometry(), pools=FakePools(tmp_path))
    with pytest.raises(AssertionError, match="fault_in"):
        slabs.frame(0)
    seen: list[tuple[int, int]] = []
    slabs.fault_in(lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 10 * FRAME)
    assert seen[-1] == (10 * FRAME, 10 * FRAME)
    for index in (-1, 10):
        with pytest.raises(AssertionError, match="of 10"):
            slabs.frame(index)
    slabs.close()


def test_progress_comes_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benthic.tiers.host.faulting.CHUNK_BYTES", 8192)
    seen: list[int] = []
    slabs = HostSlabs.open(geometry(max_slab_bytes=4 * FRAME), pools=FakePools(tmp_path))
    slabs.fault_in(lambda done, total: seen.append(done))
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert bytes(slabs.frame(9)) == bytes(FRAME)
    slabs.close()


def test_memory_can_be_brought_in_without_madvise(tmp_path: Path) -> None:
    """As on a kernel before 5.14."""
    slabs = HostSlabs.open(geometry(), pools=FakePools(tmp_path))
    places = [
        module.Place(slabs.span_address(span), span.num_bytes, slabs._files[span.slab], span.start)
        for span in slabs.spans()
    ]
    fault_in(places, lambda done, total: None, allocate_and_touch)
    assert os.fstat(slabs._files[0]).st_blocks * 512 >= 10 * FRAME
    slabs.close()


def test_memory_that_has_gone_meanwhile_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise OSError(14, "Bad address")

    slabs = HostSlabs.open(geometry(), pools=FakePools(tmp_path))
    monkeypatch.setattr(module, "fault_in", gone)
    with pytest.raises(CapacityError, match=r"ran out of memory while 120\.00 KiB.*lower --l2-size"):
        slabs.fault_in()
    slabs.close()


def test_poison_fills_a_frame_and_no_other(tmp_path: Path) -> None:
    slabs = small_slabs(tmp_path, FRAME, 4, per_slab=2)
    slabs.poison(2)
    assert set(bytes(slabs.frame(2))) == {POISON}
    assert not any(bytes(slabs.frame(1)) + bytes(slabs.frame(3)))
    slabs.close()


def test_the_names_are_gone_once_mapped(tmp_path: Path) -> None:
    slabs = HostSlabs.open(geometry(max_slab_bytes=2 * FRAME), pools=FakePools(tmp_path))
    assert list(tmp_path.iterdir()) == []
    slabs.close()


def test_close_before_unlink_removes_the_names(tmp_path: Path) -> None:
    slabs = HostSlabs.create(geometry(), pools=FakePools(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    slabs.close()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_go_and_what_lives_or_is_not_ours_stays(tmp_path: Path) -> None:
    dead, foreign = tmp_path / f"{NAME_PREFIX}dead-0", tmp_path / "somebody-elses"
    for path in (dead, foreign):
        path.write_bytes(bytes(100))
    living = HostSlabs.create(geometry(), pools=FakePools(tmp_path))  # also tidies
    assert not dead.exists()
    assert remove_leftovers(tmp_path) == 0
    assert foreign.exists()
    assert all(path.exists() for path in living.segment.paths)
    living.close()


def test_a_killed_process_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    """Killed while its slabs still have names: the worst moment."""
    code = f"""
import time
from pathlib import Path
from benthic.tiers.host.slabs import HostSlabs, SlabGeometry
from tests.support.host_pools import FakePools
shape = SlabGeometry(frame_bytes=4096, frames_per_lane=4, num_owners=1)
slabs = HostSlabs.create(shape, pools=FakePools(Path({str(tmp_path)!r})))
print("made", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        (path,) = tmp_path.iterdir()
        assert remove_leftovers(tmp_path) == 0  # it lives
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.exists()
    small_slabs(tmp_path, 4096, 1).close()
    assert not path.exists()


def test_a_name_that_a_start_beside_this_one_took_for_a_leftover_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tidied = fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if not tidied:
            tidied.append(True)
            monkeypatch.setattr(module.fcntl, "flock", real)
            assert remove_leftovers(tmp_path) == 1
        real(file, how)

    monkeypatch.setattr(module.fcntl, "flock", flock)
    path, file = module._new_file(tmp_path / f"{NAME_PREFIX}x-0")
    assert os.fstat(file).st_nlink == 1
    assert path.exists()
    os.close(file)


def huge(total: int, free: int, reserved: int, page_bytes: int = 2 * MIB) -> HugepagePool:
    return HugepagePool(page_bytes, total, free, reserved)


def test_each_slab_is_checked_with_the_earlier_ones_counted(tmp_path: Path) -> None:
    """Room for all at the first look, but somebody takes it between the first slab and the second."""

    class Shrinking(FakePools):
        looks = 0

        def room(self, path: str) -> Room | None:
            self.looks += 1
            return Room(GIB, 40 * FRAME if self.looks < 3 else 7 * FRAME)

    with pytest.raises(CapacityError, match="insufficient shared memory"):
        HostSlabs.open(geometry(max_slab_bytes=5 * FRAME), pools=Shrinking(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_slabs_come_from_a_hugetlbfs_where_one_has_the_room(tmp_path: Path) -> None:
    mount = tmp_path / "huge"
    mount.mkdir()
    pools = FakePools(
        tmp_path / "shm",
        huge=(huge(4, 4, 0),),
        mounted=(Mount(str(mount), "hugetlbfs", ("rw", "pagesize=2M")),),
        available=0,  # reserved hugepages are no ordinary memory, and need none
    )
    slabs = HostSlabs.create(geometry(), pools=pools)
    assert slabs.segment.backing.kind == "hugetlbfs"
    assert slabs.plan.slab_bytes == (2 * MIB,)
    assert slabs.segment.paths[0].parent == mount
    slabs.fault_in()
    slabs.frame(9)[:] = bytes([7]) * FRAME
    slabs.close()


def test_a_limit_of_the_container_counts(tmp_path: Path) -> None:
    pools = FakePools(tmp_path, limit=MemoryLimit(GIB, GIB - 5 * FRAME, Path("/g")))
    with pytest.raises(CapacityError, match=r"need 0\.00 GiB, 0\.00 GiB left of the control group's 1\.00 GiB; raise"):
        HostSlabs.open(geometry(), pools=pools)


def test_each_slab_s_part_of_the_own_lane_is_registered_by_itself(tmp_path: Path) -> None:
    shape = geometry(num_owners=2, frames_per_lane=5, max_slab_bytes=4 * FRAME)
    first = HostSlabs.create(shape, pools=FakePools(tmp_path))
    second = HostSlabs.attach(shape, first.segment, rank=1)
    first.unlink()
    device = FakeCuda()
    second.fault_in()
    report = second.register_cuda(device)
    assert (report.pinned, report.num_bytes, second.pinned) == (True, 5 * FRAME, True)
    assert list(device.registered.values()) == [3 * FRAME, 2 * FRAME]
    assert list(device.registered) == [second.frame_address(0), second.frame_address(3)]
    second.close()
    first.close()
    assert device.registered == {}


def test_memory_that_can_not_be_registered_works_unpinned_and_says_what_to_do(tmp_path: Path) -> None:
    slabs, device = small_slabs(tmp_path, FRAME, 10, per_slab=4), FakeCuda(max_registered=5 * FRAME)
    report = slabs.register_cuda(device)
    assert not report.pinned
    assert not slabs.pinned
    for part in ("works unpinned", "120.00 KiB", "cudaHostRegister: out of memory (2)", "memlock limit", "ulimit -l"):
        assert part in report.reason
    slabs.frame(9)[:] = bytes(FRAME)
    slabs.close()
    assert device.registered == {}


def test_a_registration_beyond_the_bound_is_refused() -> None:
    device = FakeCuda()
    with pytest.raises(CapacityError, match=r"registering 2\.00 GiB .*exceeds the bound of 1\.00 GiB.*MAX_SLAB_GIB"):
        module.register(device, 0, 2 * GIB, GIB)
    assert device.registered == {}
