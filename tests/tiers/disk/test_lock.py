"""One server a folder, whatever path leads there; a killed one leaves nothing to clean up by hand."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benthic.common.errors import ConfigError
from benthic.tiers.disk.lock import LOCK_NAME, FolderBusy, holder_of, lock_folders, lock_for_reading
from tests.support.as_user import open_folder, run_as_user

HOLD = """
import subprocess, sys, time
from pathlib import Path
from benthic.tiers.disk.lock import lock_folders
lock = lock_folders([Path(p) for p in sys.argv[2:]], "benthic serve")
if sys.argv[1] == "child":
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=lock.fds, stdin=0)
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def holding(*folders: Path, child: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folders; with `child`, one more that inherited the lock and lives till its stdin
    closes."""
    command = [sys.executable, "-c", HOLD, "child" if child else "alone", *map(str, folders)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_the_folder_is_made_private_and_the_holder_named(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "kv"
    lock = lock_folders([folder], "benthic serve")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / LOCK_NAME).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FolderBusy, match=f"in use by benthic serve, process {os.getpid()} on .*, started 20") as caught:
        lock_folders([folder], "another")
    assert str(folder) in str(caught.value)
    lock.release()
    lock.release()
    lock_folders([folder], "another").release()


def test_another_process_is_refused_by_every_path(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    (tmp_path / "link").symlink_to(folder)
    with holding(folder) as holder:
        for path in (folder, tmp_path / "link", folder / ".." / "kv"):
            with pytest.raises(FolderBusy, match=f"process {holder.pid} "):
                lock_folders([path], "second")
            with pytest.raises(FolderBusy, match=f"process {holder.pid} "):
                lock_for_reading(path)
        assert holder.poll() is None
        found = holder_of(tmp_path / "link")
        assert found is not None
        assert found.pid == holder.pid


def test_a_bind_mount_is_the_same_folder(tmp_path: Path) -> None:
    folder, other = tmp_path / "kv", tmp_path / "bound"
    other.mkdir()
    with holding(folder) as holder:
        if subprocess.run(["mount", "--bind", folder, other], capture_output=True, check=False).returncode:
            pytest.skip("no right to mount")
        try:
            with pytest.raises(FolderBusy, match=f"process {holder.pid} "):
                lock_folders([other], "second")
        finally:
            subprocess.run(["umount", other], check=True)


def test_after_a_kill_a_start_succeeds_at_once(tmp_path: Path) -> None:
    with holding(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        lock_folders([tmp_path], "next").release()
    assert holder_of(tmp_path) is None


def test_a_killed_servers_child_is_waited_for(tmp_path: Path) -> None:
    waits: list[float] = []
    with holding(tmp_path, child=True) as holder:
        holder.kill()
        holder.wait()

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                assert holder.stdin is not None
                holder.stdin.close()  # now the child ends
            time.sleep(seconds)

        lock_folders([tmp_path], "next", sleep=sleep).release()
    assert len(waits) >= 3


def test_a_child_that_does_not_end_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    now = [0.0]
    with holding(tmp_path, child=True) as holder:
        holder.kill()
        holder.wait()
        with pytest.raises(FolderBusy, match="it has ended, but a child of it still runs"):
            lock_folders([tmp_path], "next", sleep=lambda s: now.__setitem__(0, now[0] + s), clock=lambda: now[0])
    assert 5 < now[0] < 60


def test_a_running_holder_is_not_waited_for(tmp_path: Path) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("waited")

    with holding(tmp_path), pytest.raises(FolderBusy):
        lock_folders([tmp_path], "second", sleep=sleep)


def test_several_folders_are_locked_all_or_none(tmp_path: Path) -> None:
    one, two, three = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    with holding(two):
        with pytest.raises(FolderBusy, match=re.escape(str(two))):
            lock_folders([three, two, one], "second")
        lock_folders([one, three], "second").release()
    lock = lock_folders([three, two, one, one], "second")
    assert len(lock.fds) == 3
    lock.release()


def test_reading_keeps_a_writer_out_and_changes_nothing(tmp_path: Path) -> None:
    assert lock_for_reading(tmp_path).fds == ()  # never used: nothing to hold
    assert list(tmp_path.iterdir()) == []
    lock_folders([tmp_path], "first").release()
    content = (tmp_path / LOCK_NAME).read_bytes()
    lock = lock_for_reading(tmp_path)
    other = lock_for_reading(tmp_path)
    with pytest.raises(FolderBusy):
        lock_folders([tmp_path], "second")
    lock.release()
    other.release()
    assert (tmp_path / LOCK_NAME).read_bytes() == content


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "kv", tmp_path / "file"):
        with pytest.raises(ConfigError, match="is not a folder; name another --l3-dir") as caught:
            lock_folders([path], "serve")
        assert str(path) in str(caught.value)
        assert "errno" in str(caught.value)


def test_a_folder_that_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="errno 2: No such file"):
        lock_folders([tmp_path / "kv"], "clear", make=False)
    assert not (tmp_path / "kv").exists()


IMPORTS = """
import sys
from pathlib import Path
from benthic.common.errors import BenthicError
from benthic.tiers.disk.lock import lock_folders
"""
LOCK_IT = """
try:
    lock_folders([Path(sys.argv[1])], "benthic serve")
except BenthicError as error:
    print(error)
"""


def test_a_folder_that_may_not_be_written_is_refused_with_mode_and_owner() -> None:
    with open_folder() as folder:
        folder.chmod(0o500)
        said = run_as_user(IMPORTS, LOCK_IT, folder)
        assert said.stderr == ""
        assert f"errno 13: Permission denied; {folder} belongs to " in said.stdout
        assert "mode 0500" in said.stdout
        assert "change its owner or mode, or name another --l3-dir" in said.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_left_over_slab_of_another_user_is_refused() -> None:
    with open_folder() as folder:
        namespace = folder / ("ab" * 32)
        namespace.mkdir()
        namespace.chmod(0o777)
        slab = namespace / "slab-0.dat"
        slab.write_bytes(b"x")
        slab.chmod(0o600)
        said = run_as_user(IMPORTS, LOCK_IT, folder)
        assert said.stderr == ""
        assert f"{slab} belongs to root (uid 0) (mode 0600)" in said.stdout
        assert len(said.stdout.splitlines()) == 1


def test_the_lock_loads_no_torch() -> None:
    code = "import sys, benthic.tiers.disk.lock; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
