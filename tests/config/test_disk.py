"""The disk floor's configuration: what it refuses, from a file and from the flags, and what it says then."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benthic.common.errors import ConfigError
from benthic.common.units import GIB, MIB
from benthic.config.disk import DiskConfig, DiskSpec
from benthic.config.disk_file import parse_disk_config, read_disk_config

ONE = DiskConfig(disks=(DiskSpec(path=Path("/a"), budget_bytes=GIB),))
DISKS = [{"path": "/ssd0/kv", "size": "200GiB"}, {"path": "/ssd1/kv", "size": 1048576}]
FULL = """
rank_disks = [0, 1, 1, 0]
index_dir = "/nvme/index"
index_size = "64MiB"
cold_start = "clear"
min_pages = 4
spill_min_hits = 2
require_plp = true
staging_size = "1GiB"
spill_max_inflight = 10
reload_max_inflight = 3
reload_timeout_s = 1
queue_depth = 16
collect_start = 0.8
collect_stop = 0.7
[[disks]]
path = "/ssd0/kv"
size = "200GiB"
[[disks]]
path = "/ssd1/kv"
size = 1048576
"""


def test_a_full_file_sets_every_field(tmp_path: Path) -> None:
    file = tmp_path / "l3.toml"
    file.write_text(FULL)
    config = read_disk_config(file)
    assert config == DiskConfig(
        disks=(
            DiskSpec(path=Path("/ssd0/kv"), budget_bytes=200 * GIB), DiskSpec(path=Path("/ssd1/kv"), budget_bytes=MIB),
        ),
        rank_disks=(0, 1, 1, 0), index_dir=Path("/nvme/index"), index_bytes=64 * MIB, cold_start="clear", min_pages=4,
        spill_min_hits=2, require_plp=True, staging_bytes=GIB, spill_max_inflight=10, reload_max_inflight=3,
        reload_timeout_s=1.0, queue_depth=16, collect_start=0.8, collect_stop=0.7,
    )  # fmt: skip
    assert [config.disk_of(rank) for rank in range(4)] == [0, 1, 1, 0]
    with pytest.raises(ConfigError, match="4 entries, but there is a rank 4"):
        config.disk_of(4)


def test_json_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "l3.json"
    file.write_text(json.dumps({"disks": DISKS}))
    config = read_disk_config(file)
    assert config == DiskConfig(disks=config.disks)
    assert [config.disk_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert config.folders == (Path("/ssd0/kv"), Path("/ssd1/kv"))


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_disk_config({"disks": [{"path": "kv", "size": "1GiB"}]})
    assert config.disks[0].path == tmp_path / "kv"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"disks": None}, "disks: expected a list, not None"),
        ({"disks": []}, "no disk is named"),
        ({"disks": ["/a"]}, r"disks\[0\]: expected a table"),
        ({"disks": [{"path": "/a"}]}, r"disks\[0\]: size missing"),
        ({"disks": [{"path": "", "size": 1}]}, r"disks\[0\].path: expected a folder's path"),
        ({"disks": [{"path": "/a", "size": "much"}]}, r"disks\[0\].size: 'much' is not a size; write .* e.g. 64GiB"),
        ({"disks": [{"path": "/a", "size": 0}]}, "a size of 0 bytes"),
        ({"disks": [{"path": "/a", "size": 1, "slots": 4}]}, r"disks\[0\]: unknown key 'slots'; known: path, size"),
        ({"disks": [DISKS[0], DISKS[0]]}, "/ssd0/kv is named 2 times"),
        ({"rank_disks": [0, 2]}, "rank 1 is given disk 2; expected 0 … 1"),
        ({"rank_disks": []}, "rank_disks: empty"),
        ({"rank_disks": [0.5]}, r"rank_disks\[0\]: expected a whole number, not 0.5"),
        ({"rank_disks": 1}, "rank_disks: expected a list"),
        ({"queue_depth": 0}, "queue_depth: 0 is too little; it must be at least 1"),
        ({"queue_depth": True}, "queue_depth: expected a whole number, not True"),
        ({"queue_depth": "8"}, "queue_depth: expected a whole number, not '8'"),
        ({"collect_start": 0.5}, "expected 0 < collect_stop < collect_start <= 1"),
        ({"collect_start": 1.1}, "expected 0 < collect_stop < collect_start <= 1"),
        ({"collect_stop": 0}, "expected 0 < collect_stop < collect_start <= 1"),
        ({"collect_stop": "half"}, "collect_stop: expected a number, not 'half'"),
        ({"cold_start": "wipe"}, "'wipe' is not a mode; it must be load or clear"),
        ({"cold_start": 1}, "cold_start: expected text"),
        ({"min_pages": 0}, "min_pages: 0 is too little"),
        ({"spill_min_hits": -1}, "spill_min_hits: -1 is too little; it must be at least 0"),
        ({"require_plp": "yes"}, "require_plp: expected true or false"),
        ({"staging_size": 0}, "staging_bytes: 0 is too little"),
        ({"index_size": 4096}, "index_bytes: 4.00 KiB is too little; at least 1 MiB"),
        ({"reload_timeout_s": 0}, "reload_timeout_s: 0.0 is out of range"),
        ({"reload_timeout_s": 601}, "at most 600 seconds"),
        ({"l3_size": 1}, "unknown key 'l3_size'; known: cold_start, collect_start"),
    ],
)
def test_what_is_wrong_is_refused_with_what_was_expected(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    file = tmp_path / "l3.json"
    file.write_text(json.dumps({"disks": DISKS, **change}))
    with pytest.raises(ConfigError, match=says) as caught:
        read_disk_config(file)
    assert str(caught.value).startswith(f"--l3-config {file}: ")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("l3.toml", b"disks = [", "not valid TOML"),
        ("l3.json", b"{", "not valid JSON"),
        ("l3.json", b"[1]", "the file: expected a table"),
        ("l3.toml", b"", "disks is missing; expected e.g."),
        ("l3.toml", b"\xff", "can't be read"),
        ("missing/l3.toml", None, "can't be read"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_disk_config(tmp_path / name)


def test_the_index_folder_is_locked_too_unless_it_is_a_disks() -> None:
    assert replace(ONE, index_dir=Path("/b")).folders == (Path("/a"), Path("/b"))
    assert replace(ONE, index_dir=Path("/a")).folders == (Path("/a"),)
