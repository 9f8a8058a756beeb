"""A real server for benchmarks: `benthic serve` on a free port, ended in order."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

READY_S = 600


@contextmanager
def serve(model: str, *flags: str) -> Iterator[str]:
    """The address of a ready server; SIGTERM at the end."""
    command = [sys.executable, "-m", "benthic", "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _wait_until_ready(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _wait_until_ready(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            url = match[0]
            break
    else:
        raise RuntimeError("the server ended before it listened:\n" + "".join(seen))
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if httpx.get(url + "/ready").status_code == 200:
            return url
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {READY_S} s")
