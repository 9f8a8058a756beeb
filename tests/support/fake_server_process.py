"""Starts the real server process over the fake engine, and shows what is left of it afterwards."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx
import openai

ROOT = Path(__file__).parents[2]
_URL = re.compile(r"listening on (http://\S+)")


@dataclass
class FakeServer:
    """A running server, its address and what it has printed."""

    child: subprocess.Popen[str]
    tmp: Path
    url: str = ""
    out: list[str] = field(default_factory=list)

    def http(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, headers=headers)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def wait_ready(self) -> "FakeServer":
        with self.http() as http:
            wait_for(lambda: http.get("/ready").status_code == 200)
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and return the exit code."""
        self.child.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        stdout, _ = self.child.communicate(timeout=30)
        self.out.append(stdout)
        return self.child.returncode

    @property
    def text(self) -> str:
        return "".join(self.out)

    def engine_pids(self) -> list[int]:
        """The children that are still there."""
        return children(self.child.pid)

    def rank_pid(self, rank: int) -> int:
        """The child that is this rank."""
        names = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in self.engine_pids()}
        return names[f"rank-{rank}"]

    def leftovers(self) -> list[str]:
        """Folders of sockets that are still there."""
        return sorted(os.listdir(self.tmp))


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll until the condition holds; AssertionError when it never does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def running(
    tmp: Path,
    flags: Sequence[str] = (),
    engine: Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
    launcher: Sequence[str] = (),
) -> Iterator[FakeServer]:
    """A server on a free port (unless the flags name one) that has printed its address. Killed at the end if it
    lives."""
    port = [] if "--port" in flags else ["--port", "0"]
    child = spawn(tmp, [*port, *flags, "--", *engine], environ, launcher)
    server = FakeServer(child, tmp)
    try:
        _read_address(server)
        yield server
    finally:
        for pid in (*server.engine_pids(), child.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def spawn(
    tmp: Path, arguments: Sequence[str], environ: Mapping[str, str], launcher: Sequence[str] = ()
) -> "subprocess.Popen[str]":
    """`fake_server` with these arguments; `launcher`: what Python runs that starts it."""
    command = [sys.executable, *launcher, "-m", "tests.support.fake_server", *arguments]
    env = os.environ | {"TMPDIR": str(tmp), "PYTHONUNBUFFERED": "1", **environ}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )


def _read_address(server: FakeServer) -> None:
    assert server.child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(server.child.stdout, selectors.EVENT_READ)
        while not server.url:
            assert selector.select(30), "the server printed nothing"
            line = server.child.stdout.readline()
            server.out.append(line)
            if not line:  # it has ended
                return
            if match := _URL.search(line):
                server.url = match[1]
