"""Ranks that torchrun starts: the first is the server with one child, the others are engine ranks themselves."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.test_lifecycle import SLOW, Stream, assert_ended_with_error
from tests.support.fake_server_process import FakeServer, alive, children, running, spawn, wait_for

TWO = ["--cp", "2"]


def place(rank: int, *, hosts: int = 1) -> dict[str, str]:
    """What torchrun tells one of two processes."""
    local = {"LOCAL_RANK": str(rank % (2 // hosts)), "LOCAL_WORLD_SIZE": str(2 // hosts)}
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **local}


@contextmanager
def launched(
    tmp: Path, flags: list[str], engine: tuple[str, ...] = SLOW, hosts: int = 1
) -> Iterator[tuple[FakeServer, "subprocess.Popen[str]"]]:
    """The server and the process of rank 1, as torchrun would start them."""
    follower = spawn(tmp, [*TWO, "--", *engine], place(1, hosts=hosts))
    try:
        with running(tmp, [*TWO, *flags], engine, place(0, hosts=hosts)) as server:
            yield server.wait_ready(), follower
    finally:
        follower.kill()
        follower.communicate()


def connections(pid: int) -> set[str]:
    """Remote ports of the process's TCP connections, in hex."""
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists() or fd.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[2].split(":")[1] for row in rows if f"socket:[{row[9]}]" in sockets}


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_first_is_the_server_and_the_other_a_rank(tmp_path: Path, hosts: int) -> None:
    with launched(tmp_path, [], hosts=hosts) as (server, follower):
        assert len(server.engine_pids()) == 1
        assert children(follower.pid) == []
        # one host needs no port that others could write to
        assert bool(connections(follower.pid)) == (hosts == 2)
        with server.http() as http:
            assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3}).status_code == 200
        assert server.end() == 0
        assert follower.wait(20) == 0
        assert server.leftovers() == []


def test_a_rank_of_the_launcher_that_dies_is_missed_by_its_beats(tmp_path: Path) -> None:
    with launched(tmp_path, ["--beat-s", "1"]) as (server, follower):
        stream = Stream(server)
        wait_for(lambda: len(stream.events) > 80)
        follower.kill()
        assert_ended_with_error(stream.end(), "rank 1 has given no sign of life")
        assert server.wait() == 1
        assert server.leftovers() == []


def test_the_launchers_copy_of_a_signal_is_not_a_second_one(tmp_path: Path) -> None:
    with launched(tmp_path, ["--grace-s", "20"]) as (server, follower):
        stream = Stream(server, max_tokens=60)
        server.child.send_signal(signal.SIGINT)
        time.sleep(0.2)
        for process in (server.child, follower):
            process.send_signal(signal.SIGTERM)
        assert stream.end()[-1] == "data: [DONE]"
        assert server.wait() == 0
        assert follower.wait(20) == 0


def test_a_second_signal_later_is_meant(tmp_path: Path) -> None:
    with launched(tmp_path, ["--grace-s", "60"]) as (server, follower):
        Stream(server)
        server.child.send_signal(signal.SIGINT)
        time.sleep(1.3)
        assert server.end(signal.SIGINT) == 128 + signal.SIGINT
        assert follower.wait(20) == 1  # it has lost rank 0


@pytest.mark.parametrize("rank", [0, 1])
def test_another_number_of_processes_is_refused_with_both(tmp_path: Path, rank: int) -> None:
    with running(tmp_path, ["--cp", "4"], environ=place(rank)) as server:
        assert server.wait() == 1
        assert "--cp 4 asks for 4 ranks and WORLD_SIZE=2" in server.text
        assert len(server.text.strip().splitlines()) == 1


def test_one_rank_takes_no_notice_of_a_launcher(tmp_path: Path) -> None:
    with running(tmp_path, environ=place(1)) as server:
        server.wait_ready()
        assert server.end() == 0


@pytest.mark.multirank
def test_torchrun_itself(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    with running(tmp_path, [*TWO, "--grace-s", "20"], SLOW, {"OMP_NUM_THREADS": "1"}, torchrun) as server:
        server.wait_ready()
        workers = server.engine_pids()
        assert len(workers) == 2
        stream = Stream(server, max_tokens=60)
        server.child.send_signal(signal.SIGTERM)
        assert stream.end()[-1] == "data: [DONE]"
        server.wait()  # its status says which signal, not how we ended
        assert not any(alive(pid) for pid in workers)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
