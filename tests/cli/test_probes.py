"""The kernel's files as real machines write them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benthic.cli import probes
from benthic.tiers.host import pools

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8480+
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 2
model name\t: Intel(R) Xeon(R) Platinum 8480+
physical id\t: 1
core id\t\t: 0
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile
"""
GRAVITON = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd svebf16 i8mm bf16\n\nprocessor\t: 1\n"
MOUNTS_V2 = """overlay / overlay rw,relatime,lowerdir=/l 0 0
proc /proc proc rw 0 0
cgroup /sys/fs/cgroup cgroup2 rw,nosuid,nodev 0 0
hugetlbfs /dev/hugepages hugetlbfs rw,relatime,pagesize=2M 0 0
/dev/nvme0n1 /data/my\\040disk ext4 rw 0 0
tmpfs /data tmpfs rw 0 0
"""


def reader(files: dict[str, str]) -> Callable[[Path], str | None]:
    """Reads from `files` as if they were the machine's."""
    return lambda path: files.get(str(path))


def test_cpuinfo_counts_threads_and_physical_cores() -> None:
    info = probes.parse_cpuinfo(XEON)
    assert (info.model, info.threads, info.cores) == ("Intel(R) Xeon(R) Platinum 8480+", 3, 2)
    assert info.flags >= {"avx512_bf16", "amx_bf16"}


def test_cpuinfo_of_arm_has_features_and_no_core_ids() -> None:
    info = probes.parse_cpuinfo(GRAVITON)
    assert (info.model, info.threads, info.cores) == ("unknown", 2, 2)
    assert info.flags == {"fp", "asimd", "svebf16", "i8mm", "bf16"}


def test_the_filesystem_of_a_folder_is_the_longest_mount_above_it() -> None:
    mounts = pools.parse_mounts(MOUNTS_V2)
    found = {place: probes.mount_of(Path(place), mounts) for place in ("/data/my disk/x", "/data/my", "/home")}
    assert {place: mount.kind for place, mount in found.items() if mount} == {
        "/data/my disk/x": "ext4",
        "/data/my": "tmpfs",
        "/home": "overlay",
    }


def test_the_later_of_two_mounts_on_one_path_counts() -> None:
    mounts = pools.parse_mounts("a /dev/shm tmpfs rw 0 0\nb /dev/shm ext4 rw 0 0\n")
    mount = probes.mount_of(Path("/dev/shm"), mounts)
    assert mount is not None
    assert mount.kind == "ext4"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/g/cpu.max": "150000 100000\n"}, 1.5),
        ({"/g/cpu.max": "max 100000\n"}, None),
        ({"/g/cpu.cfs_quota_us": "200000\n", "/g/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"/g/cpu.cfs_quota_us": "-1\n", "/g/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cpu_quota(files: dict[str, str], quota: float | None) -> None:
    assert probes.cpu_quota([Path("/g")], reader(files)) == quota


def test_capabilities_of_root_and_of_nobody() -> None:
    assert probes.effective_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n") >> 14 & 1
    assert probes.effective_capabilities("Name:\tx\nCapEff:\t0000000000000000\n") == 0
    assert probes.effective_capabilities("") == 0


def test_missing_packages_know_spellings_and_skip_extras() -> None:
    needed = ["torch<3,>=2.9", "prometheus-client>=0.21", "Jinja2>=3.1", "triton>=3.4; extra == 'gpu'", "lmdb"]
    assert probes.missing_packages(needed, {"torch": "2.13", "prometheus_client": "1", "jinja2": "3"}) == ["lmdb"]


def test_the_disk_sample_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    sample = probes.sample_disk(tmp_path, num_writes=3)
    assert len(sample.write_seconds) == 3
    assert 0 < sample.median_s <= max(sample.write_seconds)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_not_waited_for(tmp_path: Path) -> None:
    assert len(probes.sample_disk(tmp_path, num_writes=50, limit_s=0.0).write_seconds) == 1


def test_the_disk_sample_says_why_a_folder_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probes.sample_disk(tmp_path / "missing")
    assert os.listdir(tmp_path) == []
