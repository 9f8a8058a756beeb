"""`benthic doctor`: what this machine offers, a verdict on each thing, and what to change.

Each check is a function that returns one Row, and one that fails says so in its row: the command works on any Linux
machine, without a GPU, as any user, and with only typer and rich installed. Exit code 1: nothing can be served here.
"""

import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benthic.cli import probes
from benthic.common.errors import CapacityError, ConfigError, ModelError
from benthic.common.units import GIB, MIB, format_size
from benthic.config import Options, resolve
from benthic.tiers.host import pools
from benthic.tiers.host.backing import check_capacity

Verdict = Literal["ok", "note", "problem"]

MIN_MEMORY = 512 * MIB  # torch's libraries and the built-in model in bf16, with next to no KV cache
FEW_MEMORY = 2 * GIB  # below it the built-in model in fp32 leaves little for the KV cache
MIN_FILES = 256  # libraries, sockets between the processes and a handful of clients
GOOD_FILES = 4096  # a client connection is a file handle
MIN_MEMLOCK = MIB  # below it not even I/O rings fit
CAP_IPC_LOCK = 1 << 14  # linux/capability.h
SLOW_WRITE_S = 0.020  # a spinning disk or a network volume
PIN_BYTES = 64 * MIB
HOST_TIER = "host tier"  # the row's name
_CPU_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # names in /proc/cpuinfo
_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. `stops`: with this, nothing can be served."""

    name: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""
    stops: bool = False


def register(app: typer.Typer) -> None:
    """Add `doctor` to `app`."""
    app.command()(doctor)


def doctor(
    folder: Annotated[Path, typer.Option("--dir", help="Folder whose disk is tried. E.g. --dir /var/cache")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    l2_size: Annotated[str | None, typer.Option(help="Also try a host tier of this size. E.g. 64GiB")] = None,
    l2_backing: Annotated[str | None, typer.Option(help="As for serve: auto, shm or hugetlbfs[:MOUNT].")] = None,
) -> None:
    """Show what this machine offers and what to change. Exit code 1: nothing can be served here, or not like this."""
    cache = resolve(Options(l2_size=l2_size, l2_backing=l2_backing)).engine.cache  # refuses what serve refuses
    rows = diagnose(folder)
    if cache.l2_bytes:
        rows.append(guarded(HOST_TIER, lambda: check_host_tier(cache.l2_bytes, cache.l2_backing, pools.Machine())))
    if as_json:
        typer.echo(to_json(rows))
    else:
        show(rows, Console())
    raise typer.Exit(exit_code(rows))


def diagnose(folder: Path) -> list[Row]:
    """Every finding about this machine, with the disk tried in `folder`. Never raises for what a check meets."""
    torch, torch_row = load_torch()
    checks: list[tuple[str, Callable[[], Row]]] = [
        ("Python", check_python),
        ("packages", check_packages),
        ("torch", lambda: torch_row),
        ("Triton", lambda: check_triton(torch)),
        ("built-in model", check_model),
        ("CPU", check_cpu),
        ("dtype auto", lambda: check_dtype(torch)),
        ("memory", check_memory),
        ("GPU", lambda: check_gpu(torch)),
        ("pinned memory", lambda: check_pinned(torch)),
        ("hugepages", check_hugepages),
        ("/dev/shm", check_shm),
        ("memlock limit", check_memlock),
        ("open files limit", lambda: check_nofile(*resource.getrlimit(resource.RLIMIT_NOFILE))),
        ("disk", lambda: check_disk(folder)),
    ]
    return [guarded(name, check) for name, check in checks]


def guarded(name: str, check: Callable[[], Row]) -> Row:
    """The check's row, or a row with the error that it met."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  # one probe must not hide the others, whatever it meets
        return Row(name, f"could not be told: {type(error).__name__}: {error}", "note")


def exit_code(rows: Sequence[Row]) -> int:
    """1 when a finding rules serving out."""
    return int(any(row.stops for row in rows))


def to_json(rows: Sequence[Row]) -> str:
    """One JSON object: `can_serve` and the rows."""
    return json.dumps({"can_serve": not exit_code(rows), "rows": [asdict(row) for row in rows]})


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table and one line that sums it up."""
    table = Table(show_lines=True)
    for title in ("what", "found", "verdict", "what to change"):
        table.add_column(title, overflow="fold")
    for row in rows:
        colour = _COLOURS[row.verdict]
        table.add_row(row.name, escape(row.found), f"[{colour}]{row.verdict}[/]", escape(row.remedy))
    console.print(table)
    stops = [row.name for row in rows if row.stops]
    problems = sum(row.verdict == "problem" for row in rows)
    if stops:
        how = "with this --l2-size" if stops == [HOST_TIER] else "on this machine"
        console.print(f"[bold red]Nothing can be served {how}:[/] see {', '.join(stops)}.")
    else:
        console.print("This machine can serve." + (f" Problems to look at: {problems}." if problems else ""))


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Row:
    """Python 3.11 or newer, on Linux."""
    found = f"{platform.python_version()} ({platform.system()} {platform.machine()}, {platform.release()})"
    if version < (3, 11):
        return Row("Python", found, "problem", "install Python 3.11 or newer", stops=True)
    if platform.system() != "Linux":
        return Row("Python", found, "problem", "run on Linux, or in a Linux container or virtual machine", stops=True)
    return Row("Python", found)


def check_packages() -> Row:
    """Everything that the package declares as needed is installed."""
    needed = importlib.metadata.requires("benthic") or []
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    missing = probes.missing_packages(needed, installed)
    if missing:
        names = " ".join(missing)
        return Row("packages", f"missing: {names}", "problem", f"pip install -c constraints.txt {names}", stops=True)
    return Row("packages", "all required packages are installed")


def load_torch() -> tuple[ModuleType | None, Row]:
    """torch, or None with the row that says why not."""
    try:
        import torch  # heavy: no other command than this one may pay for it at start
    except Exception as error:  # noqa: BLE001  # a broken build fails with OSError, ImportError or RuntimeError
        remedy = "pip install -c constraints.txt torch"
        return None, Row("torch", f"can't be imported: {error}", "problem", remedy, stops=True)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return torch, Row("torch", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")


def check_triton(torch: ModuleType | None) -> Row:
    """Triton, which a GPU needs and a CPU does not."""
    gpu = torch is not None and torch.cuda.is_available()
    if importlib.util.find_spec("triton") is not None:
        return Row("Triton", importlib.metadata.version("triton"))
    if gpu:
        remedy = "pip install 'benthic[gpu]'; until then only --attention-backend torch works, slowly"
        return Row("Triton", "not installed", "problem", remedy)
    return Row("Triton", "not installed; not needed without a GPU", "note")


def check_model() -> Row:
    """The model that is served when none is named, and the others that come with Benthic."""
    from benthic.weights.locate import BUILT_INS, locate  # needs packages that may be what is missing

    found = []
    try:
        for name in BUILT_INS:
            path = locate(name).path
            files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
            found.append(f"{name}: {path.name}, {format_size(sum(file.stat().st_size for file in files))}")
    except ModelError as error:
        return Row("built-in model", "; ".join((*found, "not installed")), "note", str(error))
    return Row("built-in model", "; ".join(found))


def own_cgroup(controller: str) -> list[Path]:
    """The folders of this process's control groups for `controller`."""
    mounts = pools.parse_mounts(pools.read_text(Path("/proc/self/mounts")) or "")
    return pools.cgroup_folders(controller, pools.read_text(Path("/proc/self/cgroup")) or "", mounts)


def check_cpu() -> Row:
    """Model, cores, and how many of them this process may use."""
    info = probes.parse_cpuinfo(pools.read_text(Path("/proc/cpuinfo")) or "")
    usable = len(os.sched_getaffinity(0))
    quota = probes.cpu_quota(own_cgroup("cpu"), pools.read_text)
    units = [unit for unit in _CPU_UNITS if unit in info.flags]
    counts = f"{info.cores} cores, {info.threads} threads, {usable} usable"
    found = f"{info.model}: {counts}; {', '.join(units) or 'vector units unknown'}"
    if quota is not None and quota < usable:
        remedy = (
            f"set OMP_NUM_THREADS={max(1, int(quota))}, or raise the quota: threads beyond it only stall each other"
        )
        return Row("CPU", f"{found}; the control group allows the time of {quota:g}", "note", remedy)
    return Row("CPU", found)


def check_dtype(torch: ModuleType | None) -> Row:
    """What `--dtype auto` takes here, and why."""
    if torch is None:
        return Row("dtype auto", "could not be told without torch", "note")
    from benthic.models.dtype import choose_dtype  # loads torch

    dtype, reason = choose_dtype("auto", torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return Row(
        "dtype auto", f"{str(dtype).removeprefix('torch.')}: {reason}", "note" if dtype == torch.float32 else "ok"
    )


def check_memory() -> Row:
    """What is available, with the control group's limit."""
    meminfo = pools.parse_meminfo(pools.read_text(Path("/proc/meminfo")) or "")
    return judge_memory(meminfo, pools.memory_limit(own_cgroup("memory"), pools.read_text))


def judge_memory(meminfo: dict[str, int], limit: pools.MemoryLimit | None) -> Row:
    """The row for these figures."""
    free = meminfo["MemAvailable"]
    found = f"{format_size(free)} available of {format_size(meminfo['MemTotal'])}"
    if limit is not None:
        found += f"; control group: {format_size(limit.used_bytes)} of {format_size(limit.limit_bytes)} used"
        free = min(free, limit.limit_bytes - limit.used_bytes)
    remedy = "end other programs" if limit is None else "raise the container's memory limit"
    if free < MIN_MEMORY:
        return Row("memory", found, "problem", f"{remedy}: at least {format_size(MIN_MEMORY)} is needed", stops=True)
    if free < FEW_MEMORY:
        return Row("memory", found, "note", f"{remedy} for a larger cache than the built-in model can have here")
    return Row("memory", found)


def check_gpu(torch: ModuleType | None) -> Row:
    """Name, memory, compute capability and driver of each GPU."""
    driver = pools.read_text(Path("/sys/module/nvidia/version"))
    if torch is None or not torch.cuda.is_available():
        if driver is None and not Path("/dev/nvidiactl").exists():
            return Row("GPU", "none; models run on the CPU", "note")
        remedy = "install a CUDA build of torch that this driver can run (compare with nvidia-smi)"
        build = "absent" if torch is None else f"built for {torch.version.cuda or 'CPU only'}"
        return Row("GPU", f"driver {(driver or 'unknown').strip()}, but torch ({build}) sees no GPU", "problem", remedy)
    lines, old = [], False
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        old |= major < 8
        name = torch.cuda.get_device_name(index)
        lines.append(f"{name}, {format_size(free)} free of {format_size(total)}, sm_{major}{minor}")
    lines.append(f"driver {(driver or 'unknown').strip()}")
    if old:
        return Row("GPU", "\n".join(lines), "problem", "a GPU below sm_80 is not supported: use --device cpu")
    return Row("GPU", "\n".join(lines))


def check_pinned(torch: ModuleType | None) -> Row:
    """Whether the driver registers host memory, as a host tier needs it."""
    if torch is None or not torch.cuda.is_available():
        return Row("pinned memory", "not tried: no GPU", "note")
    torch.cuda.init()
    cudart: Any = torch.cuda.cudart()
    region = mmap.mmap(-1, PIN_BYTES)  # unmapped with this frame
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    code = int(cudart.cudaHostRegister(address, PIN_BYTES, 0))
    if code:
        remedy = "raise the memlock limit (ulimit -l unlimited; docker run --ulimit memlock=-1)"
        return Row("pinned memory", f"registering {format_size(PIN_BYTES)} failed: error {code}", "problem", remedy)
    cudart.cudaHostUnregister(address)
    return Row("pinned memory", f"{format_size(PIN_BYTES)} registered")


def check_hugepages() -> Row:
    """Pools and mounts of hugepages."""
    found = pools.hugepage_pools(Path("/sys/kernel/mm/hugepages"), pools.read_text)
    mounts = pools.parse_mounts(pools.read_text(Path("/proc/self/mounts")) or "")
    return judge_hugepages(found, [m for m in mounts if m.kind == "hugetlbfs"])


def judge_hugepages(sizes: Sequence[pools.HugepagePool], mounts: Sequence[pools.Mount]) -> Row:
    """The row for these pools and hugetlbfs mounts."""
    lines = [f"{format_size(p.page_bytes)}: {p.free} free, {p.reserved} reserved of {p.total}" for p in sizes]
    found = "\n".join([*lines, "mounts: " + (", ".join(m.path for m in mounts) or "none")])
    if not any(pool.total for pool in sizes):
        return Row("hugepages", found, "note", "optional, for a large host tier: sysctl vm.nr_hugepages=N (2 MiB each)")
    if not mounts:
        return Row("hugepages", found, "note", "mount them: mount -t hugetlbfs none /dev/hugepages")
    if not any(pool.free > pool.reserved for pool in sizes):
        return Row("hugepages", found, "note", "all are taken: reserve more with sysctl vm.nr_hugepages=N")
    return Row("hugepages", found)


def check_shm(path: str = "/dev/shm") -> Row:
    """Size and room of the shared memory filesystem, which several ranks share a host tier through."""
    if not os.path.isdir(path):
        return Row("/dev/shm", "does not exist", "problem", "mount it: mount -t tmpfs tmpfs /dev/shm")
    stat = os.statvfs(path)
    return judge_shm(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def judge_shm(size: int, free: int) -> Row:
    """The row for a shared memory filesystem of `size` bytes with `free` left."""
    found = f"{format_size(free)} free of {format_size(size)}"
    if free < GIB:
        remedy = "for several ranks or a host tier: docker run --shm-size 16g, or mount -o remount,size=16G /dev/shm"
        return Row("/dev/shm", found, "problem", remedy)
    return Row("/dev/shm", found)


def check_host_tier(l2_bytes: int, wish: str, machine: pools.HostPools) -> Row:
    """What a server started with this `--l2-size` and `--l2-backing` would say."""
    try:
        backing = check_capacity(l2_bytes, wish, machine)
    except (CapacityError, ConfigError) as error:
        found, _, remedy = str(error).partition("; ")
        return Row(HOST_TIER, found, "problem", remedy, stops=True)
    unit = f" in pages of {format_size(backing.page_bytes)}" if backing.kind == "hugetlbfs" else ""
    return Row(HOST_TIER, f"{format_size(l2_bytes)} would come from {backing.folder}{unit}")


def check_memlock() -> Row:
    """The limit on locked memory, which root's capability CAP_IPC_LOCK lifts."""
    capabilities = probes.effective_capabilities(pools.read_text(Path("/proc/self/status")) or "")
    return judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], bool(capabilities & CAP_IPC_LOCK))


def judge_memlock(soft: int, lifted: bool) -> Row:
    """The row for a soft limit in bytes; `lifted`: this process may lock beyond it."""
    if soft == resource.RLIM_INFINITY:
        return Row("memlock limit", "unlimited")
    if lifted:
        return Row("memlock limit", f"{format_size(soft)}, which does not bind this user (CAP_IPC_LOCK)")
    remedy = "for a host tier: ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
    return Row("memlock limit", format_size(soft), "note" if soft >= MIN_MEMLOCK else "problem", remedy)


def check_nofile(soft: int, hard: int) -> Row:
    """The limits on open files, one a client connection. A server raises its soft limit to the hard one itself."""
    unlimited = resource.RLIM_INFINITY
    found = f"{'unlimited' if hard == unlimited else hard} (soft: {'unlimited' if soft == unlimited else soft})"
    if hard == unlimited or hard >= GOOD_FILES:
        return Row("open files limit", found)
    remedy = f"raise the hard limit to {GOOD_FILES} or more (LimitNOFILE=, docker run --ulimit nofile=65536)"
    return Row("open files limit", found, "note" if hard >= MIN_FILES else "problem", remedy)


def check_disk(folder: Path) -> Row:
    """O_DIRECT and the latency of small durable writes in `folder`."""
    place = folder.resolve()
    mounts = pools.parse_mounts(pools.read_text(Path("/proc/self/mounts")) or "")
    mount = probes.mount_of(place, mounts)
    try:
        sample = probes.sample_disk(place)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        return Row("disk", f"{place}: can't be written: {reason}", "problem", "try another folder: --dir FOLDER")
    stat = os.statvfs(place)
    return judge_disk(place, mount.kind if mount else "unknown", stat.f_bavail * stat.f_frsize, sample)


def judge_disk(place: Path, kind: str, free: int, sample: probes.DiskSample) -> Row:
    """The row for a folder on a filesystem of this `kind` with `free` bytes left."""
    slowest = max(sample.write_seconds) * 1e3
    found = (
        f"{place} ({kind}, {format_size(free)} free)\n"
        f"O_DIRECT: {'works' if sample.direct_error is None else sample.direct_error}\n"
        f"4 KiB write + fdatasync: median {sample.median_s * 1e3:.2f} ms, slowest {slowest:.2f} ms"
    )
    if kind in ("tmpfs", "ramfs", "overlay"):
        return Row(
            "disk", found, "note", f"{kind} does not outlive its machine or container: name a real disk with --dir"
        )
    if sample.median_s > SLOW_WRITE_S:
        return Row("disk", found, "note", "slow for a disk floor: use a local NVMe disk")
    if sample.direct_error is not None:
        return Row(
            "disk", found, "note", "a disk floor would go through the page cache: use ext4 or xfs for direct I/O"
        )
    return Row("disk", found)
