"""One server a cache folder, and folders that can't be used: both are refused before anything is loaded."""

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benthic.common.errors import ConfigError
from benthic.config import DiskConfig, DiskSpec
from benthic.server.floor_lock import floor_locked
from tests.support.fake_server_process import FakeServer, alive, running


def flags(folder: Path) -> list[str]:
    return ["--l2-size", "1GiB", "--l3-dir", str(folder), "--l3-size", "1GiB"]


def config(*folders: Path) -> DiskConfig:
    return DiskConfig(disks=tuple(DiskSpec(path=folder, budget_bytes=1 << 30) for folder in folders))


def is_locked(folder: Path) -> bool:
    fd = os.open(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def first(tmp: Path, folder: Path) -> Iterator[FakeServer]:
    with running(tmp, flags(folder)) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("through_symlink", [False, True])
def test_a_second_server_is_told_who_holds_the_folder(
    tmp_path: Path, folder: Path, first: FakeServer, through_symlink: bool
) -> None:
    named = folder
    if through_symlink:
        named = tmp_path / "link"
        named.symlink_to(folder)
    (tmp_path / "second").mkdir()
    with running(tmp_path / "second", flags(named)) as second:
        assert second.wait() == 1
        assert second.leftovers() == []
        assert second.engine_pids() == []
    assert str(first.child.pid) in second.text
    assert str(folder) in second.text
    assert len(second.text.strip().splitlines()) == 1
    with first.http() as http:
        assert http.get("/ready").status_code == 200
    assert first.end() == 0
    assert not is_locked(folder)


def test_after_a_kill_the_folder_is_free_as_soon_as_the_engine_has_ended(
    tmp_path: Path, folder: Path, first: FakeServer
) -> None:
    (engine,) = first.engine_pids()
    os.kill(engine, signal.SIGSTOP)  # so that it does not notice yet
    first.child.kill()
    first.child.wait()
    assert is_locked(folder)  # what it has under way may still be written
    os.kill(engine, signal.SIGCONT)
    with running(tmp_path, flags(folder)) as second:  # at once, nothing deleted by hand
        second.wait_ready()
        assert not alive(engine)
        assert second.end() == 0


def test_the_floor_of_a_server_without_one_is_not_locked(tmp: Path, folder: Path) -> None:
    with floor_locked(None) as fds:
        assert fds == ()
    with running(tmp, ["--l2-size", "1GiB"]) as server:
        server.wait_ready()
        assert server.end() == 0
    assert not folder.exists()


def test_every_folder_is_locked_and_freed_in_order(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    with floor_locked(config(two, one)) as fds:
        assert len(fds) == 2
        assert is_locked(one)
        assert is_locked(two)
    assert not is_locked(one)
    assert not is_locked(two)


def test_a_parent_that_is_a_file_is_refused_in_one_paragraph(tmp: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with running(tmp, flags(tmp_path / "file" / "kv")) as server:
        assert server.wait() == 1
        assert server.leftovers() == []
    assert str(tmp_path / "file") in server.text
    assert "Traceback" not in server.text
    assert len(server.text.strip().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_refused(folder: Path) -> None:
    with floor_locked(config(folder)):
        pass
    folder.chmod(0o500)  # its lock can still be opened
    with pytest.raises(ConfigError, match="not writable"), floor_locked(config(folder)):
        pass
    folder.chmod(0o700)
