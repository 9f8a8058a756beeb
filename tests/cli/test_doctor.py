"""Verdicts from figures, and one run on the machine at hand."""

import io
import json
import resource
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benthic.cli import doctor
from benthic.cli.probes import DiskSample
from benthic.common.errors import ConfigError
from benthic.common.units import GIB, MIB
from benthic.tiers.host.pools import HugepagePool, MemoryLimit, Mount, Room
from tests.support.host_pools import FakePools

LARGE = {"MemTotal": 64 * GIB, "MemAvailable": 60 * GIB}


def test_a_container_s_limit_counts_even_on_a_large_machine() -> None:
    row = doctor.judge_memory(LARGE, MemoryLimit(GIB, 700 * MIB, Path("/g")))
    assert (row.verdict, row.stops) == ("problem", True)
    assert "1.00 GiB" in row.found
    assert "512.00 MiB" in row.remedy


@pytest.mark.parametrize(("available", "verdict"), [(60 * GIB, "ok"), (GIB, "note"), (100 * MIB, "problem")])
def test_memory_without_a_limit(available: int, verdict: str) -> None:
    row = doctor.judge_memory({"MemTotal": 64 * GIB, "MemAvailable": available}, None)
    assert (row.verdict, row.stops) == (verdict, verdict == "problem")


def test_docker_s_default_shm_is_a_problem_with_a_remedy_and_does_not_stop_serving() -> None:
    row = doctor.judge_shm(64 * MIB, 64 * MIB)
    assert (row.verdict, row.stops) == ("problem", False)
    assert "--shm-size" in row.remedy
    assert doctor.judge_shm(16 * GIB, 16 * GIB).verdict == "ok"


def test_a_missing_shm_is_a_problem(tmp_path: Path) -> None:
    assert doctor.check_shm(str(tmp_path / "none")).verdict == "problem"


@pytest.mark.parametrize(
    ("soft", "lifted", "verdict"),
    [
        (64 * 1024, False, "problem"),
        (64 * 1024, True, "ok"),
        (8 * MIB, False, "note"),
        (resource.RLIM_INFINITY, False, "ok"),
    ],
)
def test_memlock(soft: int, lifted: bool, verdict: str) -> None:
    assert doctor.judge_memlock(soft, lifted).verdict == verdict


@pytest.mark.parametrize(("hard", "verdict"), [(64, "problem"), (1024, "note"), (20000, "ok"), (-1, "ok")])
def test_open_files_are_judged_by_the_hard_limit(hard: int, verdict: str) -> None:
    assert doctor.check_nofile(min(hard, 64), hard).verdict == verdict


def test_hugepages_need_a_pool_a_mount_and_free_pages() -> None:
    mount = [Mount("/dev/hugepages", "hugetlbfs", ())]
    pool, taken, none = (HugepagePool(2 * MIB, *counts) for counts in ((8, 8, 0), (8, 3, 3), (0, 0, 0)))
    assert doctor.judge_hugepages([pool], mount).verdict == "ok"
    assert "mount" in doctor.judge_hugepages([pool], []).remedy
    assert "all are taken" in doctor.judge_hugepages([taken], mount).remedy
    assert "optional" in doctor.judge_hugepages([none], mount).remedy


def test_a_host_tier_is_tried_as_a_server_would() -> None:
    small = FakePools(Path("/dev/shm"), rooms={"/dev/shm": Room(64 * MIB, 64 * MIB)})
    row = doctor.check_host_tier(GIB, "auto", small)
    assert (row.name, row.verdict, row.stops) == ("host tier", "problem", True)
    assert row.found == "insufficient shared memory in /dev/shm: need 1.00 GiB, 0.06 GiB free"
    assert row.remedy.startswith("enlarge it (mount -o remount,size=1g /dev/shm; docker run --shm-size 1g) or lower")
    assert doctor.check_host_tier(32 * MIB, "auto", small).verdict == "ok"
    missing = doctor.check_host_tier(GIB, "hugetlbfs", small)
    assert (missing.verdict, missing.stops) == ("problem", True)
    assert "no hugetlbfs is mounted" in missing.found
    huge = FakePools(
        Path("/dev/shm"),
        huge=(HugepagePool(2 * MIB, 600, 600, 0),),
        mounted=(Mount("/dev/hugepages", "hugetlbfs", ("pagesize=2M",)),),
    )
    assert doctor.check_host_tier(GIB, "auto", huge).found == (
        "1.00 GiB would come from /dev/hugepages in pages of 2.00 MiB"
    )


@pytest.mark.parametrize(
    ("kind", "direct_error", "seconds", "remedy"),
    [
        ("ext4", None, 0.001, ""),
        ("tmpfs", None, 0.001, "does not outlive"),
        ("nfs4", None, 0.2, "slow"),
        ("fuse", "Invalid argument", 0.001, "page cache"),
    ],
)
def test_disk(kind: str, direct_error: str | None, seconds: float, remedy: str) -> None:
    row = doctor.judge_disk(Path("/d"), kind, GIB, DiskSample(direct_error, (seconds,) * 3))
    assert remedy in row.remedy
    assert (row.verdict == "ok") == (remedy == "")
    assert (direct_error or "works") in row.found


def test_a_folder_that_can_not_be_written_is_a_row_and_not_a_crash(tmp_path: Path) -> None:
    row = doctor.check_disk(tmp_path / "missing")
    assert (row.verdict, row.stops) == ("problem", False)
    assert "No such file" in row.found


def test_python_below_3_11_stops() -> None:
    assert doctor.check_python((3, 10)).stops
    assert doctor.check_python((3, 12)).verdict == "ok"


def test_without_torch_every_other_row_still_stands() -> None:
    assert doctor.check_triton(None).name == "Triton"
    assert doctor.check_gpu(None).verdict in ("note", "problem")
    assert doctor.check_pinned(None).verdict == "note"
    assert doctor.check_dtype(None).found


def test_a_probe_that_fails_shows_its_error_in_its_row() -> None:
    def broken() -> doctor.Row:
        raise RuntimeError("driver [went] away")

    row = doctor.guarded("GPU", broken)
    assert (row.name, row.verdict, row.stops) == ("GPU", "note", False)
    assert "driver [went] away" in row.found


def test_the_table_shows_what_is_in_brackets_and_names_what_stops_serving() -> None:
    rows = [doctor.Row("GPU", "driver [went] away"), doctor.Row("torch", "absent", "problem", "pip install x[y]", True)]
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        doctor.show(rows, console)
    text = capture.get()
    assert "driver [went] away" in text
    assert "pip install x[y]" in text
    assert "Nothing can be served on this machine: see torch." in text
    assert doctor.exit_code(rows) == 1


def test_a_host_tier_that_does_not_fit_ends_the_command_with_its_name(tmp_path: Path) -> None:
    app = typer.Typer()
    doctor.register(app)
    result = CliRunner().invoke(app, ["--json", "--dir", str(tmp_path), "--l2-size", "900TiB"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["can_serve"]) == (1, False)
    assert answer["rows"][-1]["name"] == "host tier"
    assert answer["rows"][-1]["found"].startswith("insufficient")
    refused = CliRunner().invoke(app, ["--dir", str(tmp_path), "--l2-backing", "shm"])
    assert isinstance(refused.exception, ConfigError)
    assert "--l2-size" in str(refused.exception)


def test_a_run_on_this_machine(tmp_path: Path) -> None:
    app = typer.Typer()
    doctor.register(app)
    result = CliRunner().invoke(app, ["--json", "--dir", str(tmp_path)])
    answer = json.loads(result.stdout)
    assert result.exit_code == (0 if answer["can_serve"] else 1)
    rows = {row["name"]: row for row in answer["rows"]}
    assert len(rows) == 15
    assert str(tmp_path) in rows["disk"]["found"]
    assert not [row for row in rows.values() if "could not be told" in row["found"]]
    assert list(tmp_path.iterdir()) == []
