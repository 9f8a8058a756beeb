"""Which memory a host tier takes, and what is said where there is too little."""

from pathlib import Path

import pytest

from benthic.common.errors import CapacityError, ConfigError
from benthic.common.units import GIB, MIB
from benthic.tiers.host.backing import Backing, check_capacity, choose_backing, demand_room
from benthic.tiers.host.pools import HugepagePool, Machine, MemoryLimit, Mount, Room
from tests.support.host_pools import FakePools

SHM = Path("/dev/shm")
TWO = Mount("/dev/hugepages", "hugetlbfs", ("rw", "relatime", "pagesize=2M"))
GIANT = Mount("/mnt/huge1g", "hugetlbfs", ("rw", "pagesize=1024M"))
OTHER = Mount("/data", "ext4", ("rw",))


def pools(*, free: int = 0, reserved: int = 0, giant: int = 0, **changes: object) -> FakePools:
    huge = (HugepagePool(2 * MIB, 1 << 20, free, reserved), HugepagePool(GIB, giant, giant, 0))
    return FakePools(SHM, huge=huge, mounted=(OTHER, TWO, GIANT), **changes)  # type: ignore[arg-type]


def test_auto_takes_hugepages_only_where_all_of_it_fits() -> None:
    assert check_capacity(GIB, "auto", pools(free=512)).kind == "hugetlbfs"
    assert check_capacity(GIB, "auto", pools(free=511)) == Backing("shm", SHM, 4096)
    assert check_capacity(GIB, "auto", pools(free=600, reserved=100)).kind == "shm"
    assert check_capacity(GIB, "auto", pools(giant=1)) == Backing("hugetlbfs", Path("/mnt/huge1g"), GIB)
    assert check_capacity(GIB, "auto", pools(free=512, read_only=("/dev/hugepages",))).kind == "shm"
    assert check_capacity(GIB, "auto", FakePools(SHM)).kind == "shm"


def test_a_named_mount_is_taken() -> None:
    assert choose_backing("hugetlbfs", GIB, pools()).folder == Path("/dev/hugepages")
    assert choose_backing("hugetlbfs:/mnt/huge1g/", GIB, pools()).page_bytes == GIB
    assert choose_backing("shm", GIB, pools(free=9999)).kind == "shm"


def test_a_mount_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="mounted: /dev/hugepages, /mnt/huge1g"):
        choose_backing("hugetlbfs:/mnt/none", GIB, pools())
    with pytest.raises(ConfigError, match="mount -t hugetlbfs none /dev/hugepages"):
        choose_backing("hugetlbfs", GIB, FakePools(SHM))


def test_too_few_hugepages_name_the_mount_need_have_and_remedy() -> None:
    with pytest.raises(CapacityError) as caught:
        check_capacity(2 * GIB, "hugetlbfs", pools(free=600, reserved=88))
    assert str(caught.value) == (
        "insufficient hugepages in /dev/hugepages: need 2.00 GiB (1024 × 2 MiB pages), "  # noqa: RUF001
        "1.00 GiB free; reserve more or lower --l2-size"
    )
    with pytest.raises(CapacityError, match=r"need 3\.00 GiB \(3 . 1 GiB pages\), 2\.00 GiB free"):
        check_capacity(2 * GIB + 1, "hugetlbfs:/mnt/huge1g", pools(giant=2))


def test_a_mount_s_own_limit_counts_where_it_is_smaller() -> None:
    limited = pools(free=1024, rooms={"/dev/hugepages": Room(GIB, GIB)})
    assert check_capacity(GIB, "hugetlbfs", limited).kind == "hugetlbfs"
    with pytest.raises(CapacityError, match=r"1\.00 GiB free"):
        check_capacity(GIB + 1, "hugetlbfs", limited)
    unlimited = pools(free=1024, rooms={"/dev/hugepages": None})
    assert check_capacity(2 * GIB, "hugetlbfs", unlimited).kind == "hugetlbfs"


def test_hugepages_are_not_checked_against_ordinary_memory() -> None:
    scarce = pools(free=1024, available=10 * MIB, limit=MemoryLimit(MIB, MIB, Path("/g")))
    assert check_capacity(2 * GIB, "hugetlbfs", scarce).kind == "hugetlbfs"
    with pytest.raises(CapacityError, match="insufficient memory"):
        check_capacity(2 * GIB, "shm", scarce)


def test_a_small_shm_is_refused_with_the_size_that_would_do() -> None:
    small = pools(rooms={"/dev/shm": Room(64 * MIB, 60 * MIB)})
    with pytest.raises(CapacityError) as caught:
        check_capacity(GIB, "auto", small)
    assert str(caught.value) == (
        "insufficient shared memory in /dev/shm: need 1.00 GiB, 0.06 GiB free; enlarge it "
        "(mount -o remount,size=2g /dev/shm; docker run --shm-size 2g) or lower --l2-size"
    )


def test_a_missing_shm_is_refused() -> None:
    class Without(FakePools):
        def room(self, path: str) -> Room | None:
            raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(CapacityError, match=r"no shared memory in /dev/shm: No such file.*mount -t tmpfs"):
        check_capacity(GIB, "shm", Without(SHM))


def test_too_little_memory_names_who_limits_it() -> None:
    with pytest.raises(CapacityError) as caught:
        check_capacity(8 * GIB, "shm", pools(available=3 * GIB))
    assert str(caught.value) == (
        "insufficient memory: need 8.00 GiB, 3.00 GiB available; free memory or lower --l2-size"
    )
    with pytest.raises(CapacityError) as caught:
        check_capacity(8 * GIB, "shm", pools(limit=MemoryLimit(4 * GIB, GIB, Path("/g"))))
    assert str(caught.value) == (
        "insufficient memory: need 8.00 GiB, 3.00 GiB left of the control group's 4.00 GiB; "
        "raise the container's memory limit or lower --l2-size"
    )


def test_what_is_promised_and_not_taken_yet_is_not_free() -> None:
    backing = choose_backing("shm", GIB, pools())
    room = pools(rooms={"/dev/shm": Room(2 * GIB, 2 * GIB)})
    demand_room(backing, GIB, room, pending_bytes=GIB)
    with pytest.raises(CapacityError, match=r"need 2\.00 GiB"):
        demand_room(backing, GIB, room, pending_bytes=GIB + 1)


def test_the_machine_at_hand_answers() -> None:
    machine = Machine()
    assert machine.available_bytes() > 0
    assert any(mount.kind == "proc" for mount in machine.mounts())
    room = machine.room("/")
    assert room is None or 0 <= room.free_bytes <= room.size_bytes
    assert machine.writable("/proc/self/task") is False or machine.writable("/tmp")
    assert all(pool.free <= pool.total for pool in machine.hugepages())
