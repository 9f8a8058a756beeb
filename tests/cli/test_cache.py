"""`benthic cache`: what it prints, its exit codes, and what it does while a server holds the folder."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benthic.cli import build_app
from benthic.common.errors import ConfigError
from benthic.tiers.disk.layout import namespace_folder
from benthic.tiers.disk.lock import FolderBusy, lock_folders
from tests.support.disk_floor import GEOMETRY, NAMESPACE, config_for, flip_bit, open_one, page_hash, store

OTHER = bytes(32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder with two namespaces of four pages."""
    kv = tmp_path / "kv"
    lock_folders([kv], "benthic serve").release()
    for namespace in (NAMESPACE, OTHER):
        floor = open_one(config_for(kv), namespace=namespace)
        store(floor, range(4))
        floor.close()
    return kv


def run(*words: object, ok: bool = True) -> str:
    result = CliRunner().invoke(build_app(), ["cache", *map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code == 0) is ok, result.output
    return result.stdout


def test_ls_names_what_is_there(folder: Path) -> None:
    text = run("ls", folder)
    assert NAMESPACE.hex()[:12] in text
    assert OTHER.hex()[:12] in text
    assert "model a model of the tests" in text
    assert OTHER.hex()[:12] not in run("ls", folder, "--namespace", NAMESPACE.hex()[:4])
    found = json.loads(run("ls", folder, "--json"))
    assert [one["namespace"] for one in found["namespaces"]] == sorted((OTHER.hex(), NAMESPACE.hex()))
    assert found["held_by"] is None


def test_stat_shows_slots_and_pages(folder: Path) -> None:
    assert "slab-0.dat" in run("stat", folder)
    [one] = json.loads(run("stat", folder, "--json", "--namespace", NAMESPACE.hex()))["namespaces"]
    [slab] = one["slabs"]
    assert (slab["num_pages"], slab["ages"]) == (4, [0, 3])
    assert one["geometry"]["frame_bytes"] == GEOMETRY.frame_bytes


def test_verify_tells_whole_from_damaged_by_its_exit_code(folder: Path) -> None:
    assert run("verify", folder).count("4 pages, all whole") == 2
    flip_bit(namespace_folder(folder, NAMESPACE) / "slab-0.dat", 8 * 5000)
    text = run("verify", folder, ok=False)
    assert "bad payload" in text
    assert page_hash(0).hex() in text
    found = json.loads(run("verify", folder, "--json", ok=False))
    damaged = {one["namespace"]: one["damaged"] for one in found["namespaces"]}
    assert damaged[OTHER.hex()] == []
    [damage] = damaged[NAMESPACE.hex()]
    assert (damage["slot"], damage["hash"], damage["kind"]) == (0, page_hash(0).hex(), "bad payload")
    run("verify", folder, "--namespace", OTHER.hex()[:3])


def test_verify_of_a_damaged_index_or_manifest(folder: Path) -> None:
    (namespace_folder(folder, NAMESPACE) / "index-0.lmdb").write_bytes(bytes(9000))
    assert "index" in run("verify", folder, ok=False)
    (namespace_folder(folder, OTHER) / "manifest.toml").write_text("x")
    assert "can't be right" in run("verify", folder, "--namespace", OTHER.hex(), ok=False)


def test_clear_removes_one_or_all(folder: Path) -> None:
    assert f"removed {OTHER.hex()[:12]}" in run("clear", folder, "--namespace", OTHER.hex()[:12])
    assert sorted(os.listdir(folder)) == sorted((NAMESPACE.hex(), "lock"))
    found = json.loads(run("clear", folder, "--json"))
    assert [one["namespace"] for one in found["removed"]] == [NAMESPACE.hex()]
    assert os.listdir(folder) == ["lock"]
    assert "holds no pages" in run("ls", folder)
    assert "holds no pages" in run("stat", folder)
    assert "nothing to remove" in run("clear", folder)
    assert run("verify", folder) == ""


def test_beside_a_server_ls_and_stat_work_and_the_others_name_it(folder: Path) -> None:
    lock = lock_folders([folder], "benthic serve")
    for command in ("ls", "stat"):
        assert f"in use by benthic serve, process {os.getpid()} " in run(command, folder)
    assert "benthic serve" in json.loads(run("stat", folder, "--json"))["held_by"]
    for command in ("verify", "clear"):
        with pytest.raises(FolderBusy, match=f"benthic serve, process {os.getpid()} "):
            run(command, folder)
    lock.release()
    run("verify", folder)


def test_a_read_only_mount_can_be_looked_at_and_not_cleared(folder: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if subprocess.run(["mount", "--bind", folder, mounted], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", mounted], check=True)
        assert run("verify", mounted).count("all whole") == 2
        assert "slab-0.dat" in run("stat", mounted)
        with pytest.raises(ConfigError, match=f"errno {errno.EROFS}: .*mounted read-only"):
            run("clear", mounted)
        with pytest.raises(ConfigError, match=f"errno {errno.EROFS}: .*mounted read-only"):
            lock_folders([mounted], "benthic serve")
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_wrong_folders_and_namespaces_are_one_sentence_and_nothing_is_made(tmp_path: Path, folder: Path) -> None:
    for command in ("ls", "stat", "verify", "clear"):
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(ConfigError, match=r"not a cache folder|No such file"):
                run(command, path)
        with pytest.raises(ConfigError, match="fits no namespace"):
            run(command, folder, "--namespace", "zz")
    assert sorted(os.listdir(tmp_path)) == ["kv"]


def test_the_commands_teach() -> None:
    for command in ("ls", "stat", "verify", "clear"):
        assert f"Example: benthic cache {command}" in " ".join(run(command, "--help").split())
