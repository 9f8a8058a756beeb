"""The kernel's files as real machines write them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benthic.cli import probes

MEMINFO = """MemTotal:       24684092 kB
MemFree:        23612636 kB
MemAvailable:   24243372 kB
HugePages_Total:       7
Hugepagesize:       2048 kB
nonsense
"""
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
MOUNTS_V1 = """tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
"""


def reader(files: dict[str, str]) -> Callable[[Path], str | None]:
    """Reads from `files` as if they were the machine's."""
    return lambda path: files.get(str(path))


def test_meminfo_is_in_bytes_and_counts_stay_counts() -> None:
    values = probes.parse_meminfo(MEMINFO)
    assert values["MemAvailable"] == 24243372 * 1024
    assert values["HugePages_Total"] == 7
    assert "nonsense" not in values


def test_cpuinfo_counts_threads_and_physical_cores() -> None:
    info = probes.parse_cpuinfo(XEON)
    assert (info.model, info.threads, info.cores) == ("Intel(R) Xeon(R) Platinum 8480+", 3, 2)
    assert info.flags >= {"avx512_bf16", "amx_bf16"}


def test_cpuinfo_of_arm_has_features_and_no_core_ids() -> None:
    info = probes.parse_cpuinfo(GRAVITON)
    assert (info.model, info.threads, info.cores) == ("unknown", 2, 2)
    assert info.flags == {"fp", "asimd", "svebf16", "i8mm", "bf16"}


def test_the_filesystem_of_a_folder_is_the_longest_mount_above_it() -> None:
    mounts = probes.parse_mounts(MOUNTS_V2)
    found = {place: probes.mount_of(Path(place), mounts) for place in ("/data/my disk/x", "/data/my", "/home")}
    assert {place: mount.kind for place, mount in found.items() if mount} == {
        "/data/my disk/x": "ext4",
        "/data/my": "tmpfs",
        "/home": "overlay",
    }


def test_the_later_of_two_mounts_on_one_path_counts() -> None:
    mounts = probes.parse_mounts("a /dev/shm tmpfs rw 0 0\nb /dev/shm ext4 rw 0 0\n")
    mount = probes.mount_of(Path("/dev/shm"), mounts)
    assert mount is not None
    assert mount.kind == "ext4"


def test_memory_limit_v2_is_the_tightest_of_all_ancestors() -> None:
    folders = probes.cgroup_folders("memory", "0::/pod.slice/box\n", probes.parse_mounts(MOUNTS_V2))
    assert [str(f) for f in folders] == ["/sys/fs/cgroup/pod.slice/box", "/sys/fs/cgroup/pod.slice", "/sys/fs/cgroup"]
    files = {
        "/sys/fs/cgroup/pod.slice/box/memory.max": "max\n",
        "/sys/fs/cgroup/pod.slice/memory.max": "4294967296\n",
        "/sys/fs/cgroup/pod.slice/memory.current": "3000000000\n",
        "/sys/fs/cgroup/pod.slice/memory.stat": "anon 5\nactive_file 7\ninactive_file 1000000000\n",
        "/sys/fs/cgroup/memory.max": "8589934592\n",
    }
    limit = probes.memory_limit(folders, reader(files))
    assert limit == probes.MemoryLimit(4294967296, 2_000_000_000, Path("/sys/fs/cgroup/pod.slice"))


def test_memory_limit_v1_falls_back_to_the_mount_inside_a_container() -> None:
    cgroup = "9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n"
    folders = probes.cgroup_folders("memory", cgroup, probes.parse_mounts(MOUNTS_V1))
    files = {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "500\n",
        "/sys/fs/cgroup/memory/memory.stat": "cache 9\ntotal_inactive_file 100\n",
    }
    assert probes.memory_limit(folders, reader(files)) == probes.MemoryLimit(
        1 << 30, 400, Path("/sys/fs/cgroup/memory")
    )


def test_the_huge_number_of_v1_means_no_limit() -> None:
    files = {"/g/memory.limit_in_bytes": "9223372036854771712\n"}
    assert probes.memory_limit([Path("/g")], reader(files)) is None


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


def test_hugepage_pools_by_size(tmp_path: Path) -> None:
    for size, counts in (("1048576", (0, 0, 0)), ("2048", (512, 300, 12))):
        folder = tmp_path / f"hugepages-{size}kB"
        folder.mkdir()
        for name, count in zip(("nr", "free", "resv"), counts, strict=True):
            (folder / f"{name}_hugepages").write_text(f"{count}\n")
    assert probes.hugepage_pools(tmp_path, probes.read_text) == [
        probes.HugepagePool(2 << 20, 512, 300, 12),
        probes.HugepagePool(1 << 30, 0, 0, 0),
    ]


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
