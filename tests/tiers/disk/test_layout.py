"""Budgets: how many slots they give, that the files never take more, and that the disk must have the room."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.common.errors import CapacityError, ConfigError
from benthic.config.disk import DiskConfig, DiskSpec
from benthic.tiers.disk.io import SystemDisk
from benthic.tiers.disk.layout import check_room, is_own_file, namespace_folder, plan_files
from tests.support.disk_floor import GEOMETRY, KIB, NAMESPACE, config_for, open_one

SLOT = GEOMETRY.slot_bytes


class SmallDisk(SystemDisk):
    """A filesystem with so many bytes free."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, path: Path) -> int:
        return self.free


@settings(deadline=None)
@given(budgets=st.lists(st.integers(4096 * KIB, 40_000 * KIB), min_size=1, max_size=3), num_ranks=st.integers(1, 8))
def test_the_files_of_a_disk_stay_within_its_budget(budgets: list[int], num_ranks: int) -> None:
    disks = tuple(DiskSpec(path=Path(f"/none/{n}"), budget_bytes=size) for n, size in enumerate(budgets))
    files = plan_files(DiskConfig(disks=disks), NAMESPACE, GEOMETRY, num_ranks)
    assert [plan.number for plan in files] == list(range(num_ranks))
    for number, size in enumerate(budgets):
        here = [plan for plan in files if plan.disk == number]
        used = sum(plan.num_slots * SLOT + plan.index_bytes for plan in here)
        assert used <= size
        if here:  # and no slot more would fit a file
            assert used + len(here) * (SLOT + 128 * KIB) > size
        assert all(plan.number % len(budgets) == number for plan in here)


def test_an_explicit_map_of_ranks_to_disks_and_an_index_folder(tmp_path: Path) -> None:
    config = DiskConfig(
        disks=(
            DiskSpec(path=tmp_path / "a", budget_bytes=4096 * KIB),
            DiskSpec(path=tmp_path / "b", budget_bytes=2**21),
        ),
        rank_disks=(1, 0, 0),
        index_dir=tmp_path / "fast",
    )
    files = plan_files(config, NAMESPACE, GEOMETRY, 3)
    assert [plan.disk for plan in files] == [1, 0, 0]
    assert files[0].index == tmp_path / "fast" / NAMESPACE.hex() / "index-0.lmdb"
    assert files[0].slab == tmp_path / "b" / NAMESPACE.hex() / "slab-0.dat"
    assert config.folders == (tmp_path / "a", tmp_path / "b", tmp_path / "fast")
    with pytest.raises(ConfigError, match="3 entries, but there is a rank 3"):
        plan_files(config, NAMESPACE, GEOMETRY, 4)


def test_a_slab_is_used_on_whichever_disk_it_lies(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    for disk, number in ((one, 1), (two, 0)):
        namespace_folder(disk, NAMESPACE).mkdir(parents=True)
        (namespace_folder(disk, NAMESPACE) / f"slab-{number}.dat").write_bytes(b"")
    disks = tuple(DiskSpec(path=path, budget_bytes=4096 * KIB) for path in (one, two))
    files = plan_files(DiskConfig(disks=disks), NAMESPACE, GEOMETRY, 2)
    assert [plan.disk for plan in files] == [1, 0]
    (namespace_folder(one, NAMESPACE) / "slab-0.dat").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"slab-0\.dat lies in .*a and in .*b; remove the copy"):
        plan_files(DiskConfig(disks=disks), NAMESPACE, GEOMETRY, 2)


def test_a_budget_below_one_page_says_how_much_is_needed(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"64\.00 KiB for 1 file is too little: .*; give at least \d+\.\d+ KiB"):
        plan_files(config_for(tmp_path, 64 * KIB), NAMESPACE, GEOMETRY, 1)
    text = "4 files is too little"
    with pytest.raises(CapacityError, match=text):
        plan_files(config_for(tmp_path, 1024 * KIB), NAMESPACE, GEOMETRY, 4)


def test_more_than_the_disk_has_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"8\.00 MiB is asked for, but only 5\.00 MiB can be had") as caught:
        open_one(config_for(tmp_path, 8192 * KIB), io=SmallDisk(5120 * KIB))
    assert "lower --l3-size" in str(caught.value)
    assert not list(namespace_folder(tmp_path, NAMESPACE).glob("slab-*"))


def test_what_the_own_files_take_counts_as_room(tmp_path: Path) -> None:
    config = config_for(tmp_path, 4096 * KIB)
    open_one(config).close()
    open_one(config, io=SmallDisk(512 * KIB)).close()
    with pytest.raises(CapacityError, match=r"5\.00 MiB is asked for, but only 4\.\d\d MiB can be had"):
        open_one(config_for(tmp_path, 5120 * KIB), io=SmallDisk(512 * KIB))


def test_other_namespaces_are_named_with_the_command_that_frees_them_and_stay(tmp_path: Path) -> None:
    other = bytes(32)
    open_one(config_for(tmp_path, 4096 * KIB), namespace=other).close()
    before = {path: path.stat().st_mtime_ns for path in namespace_folder(tmp_path, other).iterdir()}
    with pytest.raises(CapacityError) as caught:
        open_one(config_for(tmp_path, 4096 * KIB), io=SmallDisk(1024 * KIB))
    text = str(caught.value)
    assert re.search(r"only 1\.\d\d MiB can be had", text)
    assert f"benthic cache clear {tmp_path} --namespace {other.hex()[:12]}" in text
    assert {path: path.stat().st_mtime_ns for path in namespace_folder(tmp_path, other).iterdir()} == before


def test_folders_on_one_filesystem_count_together(tmp_path: Path) -> None:
    disks = tuple(DiskSpec(path=tmp_path / name, budget_bytes=3072 * KIB) for name in "ab")
    for disk in disks:
        disk.path.mkdir()
    config = DiskConfig(disks=disks)
    files = plan_files(config, NAMESPACE, GEOMETRY, 2)
    check_room(config, NAMESPACE, files, SmallDisk(6144 * KIB))
    with pytest.raises(CapacityError, match=r"6\.00 MiB is asked for"):
        check_room(config, NAMESPACE, files, SmallDisk(6143 * KIB))
    indexed = replace(config, index_dir=tmp_path / "a")
    check_room(indexed, NAMESPACE, plan_files(indexed, NAMESPACE, GEOMETRY, 2), SmallDisk(6144 * KIB))


def test_which_files_are_the_floors_own() -> None:
    own = ("slab-0.dat", "index-12.lmdb", "index-0.lmdb-lock", "manifest.toml", "manifest.toml.new", "probe")
    assert all(map(is_own_file, own))
    assert not any(map(is_own_file, ("slab-0.dat.bak", "notes.txt", "slab-x.dat", "lock", "index-0.lmdb.old")))
