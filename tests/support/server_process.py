"""A real `benthic serve` process for end-to-end tests, and what a user would look at.

Its output, exit code and children.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_S = 180.0
ROOT = Path(__file__).parents[2]
SERVE = (sys.executable, "-c", "from benthic.cli import main; main()", "serve")


class ServerProcess:
    """Started by the constructor on a free port of 127.0.0.1; `stop` ends it.

    Output goes to a file, so no pipe can fill up. `command` may be another one that takes `benthic serve`'s arguments.
    """

    def __init__(
        self, *arguments: str, env: dict[str, str] | None = None, port: int = 0, command: Sequence[str] = SERVE
    ) -> None:
        self.log = Path(tempfile.mkstemp(prefix="benthic-test-", suffix=".log")[1])
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, *arguments, "--port", str(port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=ROOT,  # where the test package is
                start_new_session=True,
            )
        self.url = ""

    def output(self) -> str:
        """All that the process has printed."""
        return self.log.read_text()

    def wait_ready(self, timeout_s: float = READY_S) -> "ServerProcess":
        """Wait for /ready. Fails with the output if the process ends first."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.output()}"
            if not self.url and (match := re.search(r"http://127\.0\.0\.1:\d+", self.output())):
                self.url = match[0]
            with contextlib.suppress(httpx.ConnectError):  # it is about to end: say so with its output
                if self.url and httpx.get(self.url + "/ready", timeout=30, verify=False).status_code == 200:
                    return self
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.output()}")

    def wait(self, timeout_s: float) -> int:
        """The exit code; fails if the process still runs after `timeout_s`."""
        return self.process.wait(timeout_s)

    def family(self) -> list[psutil.Process]:
        """The server process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Send `how`, wait, check that no process is left, and return the exit code."""
        if self.process.poll() is not None:
            return self.process.returncode
        family = self.family()
        self.process.send_signal(how)
        code = self.process.wait(timeout_s)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"left behind: {alive}"
        return code

    def kill(self) -> None:
        """End the server whatever it does; for clean-up."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self.log.unlink(missing_ok=True)

    def get(self, path: str) -> Any:
        """Parsed JSON of a GET that must succeed."""
        response = httpx.get(self.url + path, timeout=60, verify=False)  # plain HTTP: spare reading the certificates
        response.raise_for_status()
        return response.json()

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 300) -> httpx.Response:
        """A POST, whatever its status."""
        return httpx.post(self.url + path, json=body, timeout=timeout_s, verify=False)

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """A greedy completion that must succeed."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @property
    def model(self) -> str:
        """The served model's name."""
        name: str = self.get("/v1/models")["data"][0]["id"]
        return name

    def wait_quiet(self, timeout_s: float = 30) -> dict[str, Any]:
        """The cache state once nothing runs or waits; every page must then be free or cached."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            state = self.get("/cache")
            if not any(state["requests"].values()) and not any(lane["private"] for lane in lanes_of(state)):
                for lane in lanes_of(state):
                    assert lane["free"] + lane["cached"] == lane["total"], state
                    assert lane["locked"] == 0, state
                return state
            time.sleep(0.05)
        raise AssertionError(f"not quiet: {json.dumps(self.get('/cache'))}")


def lanes_of(state: dict[str, Any]) -> list[dict[str, int]]:
    """The L1 lanes in /cache's answer."""
    lanes: list[dict[str, int]] = state["tiers"]["l1"]["lanes"]
    return lanes
