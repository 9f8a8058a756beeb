"""The kernel's files on memory, as real machines write them."""

from collections.abc import Callable
from pathlib import Path

from benthic.tiers.host import pools

MEMINFO = """MemTotal:       24684092 kB
MemFree:        23612636 kB
MemAvailable:   24243372 kB
HugePages_Total:       7
Hugepagesize:       2048 kB
nonsense
"""
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
    values = pools.parse_meminfo(MEMINFO)
    assert values["MemAvailable"] == 24243372 * 1024
    assert values["HugePages_Total"] == 7
    assert "nonsense" not in values


def test_memory_limit_v2_is_the_tightest_of_all_ancestors() -> None:
    folders = pools.cgroup_folders("memory", "0::/pod.slice/box\n", pools.parse_mounts(MOUNTS_V2))
    assert [str(f) for f in folders] == ["/sys/fs/cgroup/pod.slice/box", "/sys/fs/cgroup/pod.slice", "/sys/fs/cgroup"]
    files = {
        "/sys/fs/cgroup/pod.slice/box/memory.max": "max\n",
        "/sys/fs/cgroup/pod.slice/memory.max": "4294967296\n",
        "/sys/fs/cgroup/pod.slice/memory.current": "3000000000\n",
        "/sys/fs/cgroup/pod.slice/memory.stat": "anon 5\nactive_file 7\ninactive_file 1000000000\n",
        "/sys/fs/cgroup/memory.max": "8589934592\n",
    }
    limit = pools.memory_limit(folders, reader(files))
    assert limit == pools.MemoryLimit(4294967296, 2_000_000_000, Path("/sys/fs/cgroup/pod.slice"))


def test_memory_limit_v1_falls_back_to_the_mount_inside_a_container() -> None:
    cgroup = "9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n"
    folders = pools.cgroup_folders("memory", cgroup, pools.parse_mounts(MOUNTS_V1))
    files = {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "500\n",
        "/sys/fs/cgroup/memory/memory.stat": "cache 9\ntotal_inactive_file 100\n",
    }
    assert pools.memory_limit(folders, reader(files)) == pools.MemoryLimit(1 << 30, 400, Path("/sys/fs/cgroup/memory"))


def test_the_huge_number_of_v1_means_no_limit() -> None:
    files = {"/g/memory.limit_in_bytes": "9223372036854771712\n"}
    assert pools.memory_limit([Path("/g")], reader(files)) is None


def test_hugepage_pools_by_size(tmp_path: Path) -> None:
    for size, counts in (("1048576", (0, 0, 0)), ("2048", (512, 300, 12))):
        folder = tmp_path / f"hugepages-{size}kB"
        folder.mkdir()
        for name, count in zip(("nr", "free", "resv"), counts, strict=True):
            (folder / f"{name}_hugepages").write_text(f"{count}\n")
    assert pools.hugepage_pools(tmp_path, pools.read_text) == [
        pools.HugepagePool(2 << 20, 512, 300, 12),
        pools.HugepagePool(1 << 30, 0, 0, 0),
    ]
