"""Start and end as a user meets them.

Signals, a port in use, a damaged or missing model, too little memory, a dead engine.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import FLAGS
from tests.support.server_process import ServerProcess

MODEL = "smollm2-135m"
SMALL = (*FLAGS[: FLAGS.index("--l1-size")], "--l1-pages", "200", "--max-running", "4", "--graph-batch-sizes", "1,2,4")


def run_to_end(*arguments: str, timeout_s: float = 60) -> tuple[int, str, float]:
    """(exit code, output, seconds) of a `benthic serve` that must end by itself."""
    start = time.monotonic()
    command = [sys.executable, "-m", "benthic", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


def assert_one_paragraph(output: str, *words: str) -> None:
    assert "Traceback" not in output, output
    for word in words:
        assert word in output, f"{word!r} not in:\n{output}"
    assert "\n\n" not in output.strip(), output


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_with_exit_code_0(how):
    server = ServerProcess(*SMALL)
    try:
        server.wait_ready()
        server.complete("hello")
        assert len(server.family()) >= 2
        # as a terminal does it: the signal reaches the whole process group
        family = server.family()
        os.killpg(server.process.pid, how)
        assert server.wait(30) == 0, server.output()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        assert "Traceback" not in server.output()
    finally:
        server.kill()


def test_sigterm_lets_a_running_request_finish():
    server = ServerProcess(*SMALL, "--grace-s", "60")
    try:
        server.wait_ready()
        answers: list[httpx.Response] = []
        body = {"model": MODEL, "prompt": "A long goodbye", "max_tokens": 60, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
        thread.start()
        while server.get("/cache")["requests"]["running"] == 0:
            time.sleep(0.02)
        assert server.stop() == 0
        thread.join(10)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 60
    finally:
        server.kill()


def test_a_killed_engine_ends_the_server_and_its_streams_without_the_mark_of_an_answer():
    server = ServerProcess(*SMALL)
    try:
        server.wait_ready()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        lines: list[str] = []
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 10:
                    engine = next(p for p in server.family()[1:] if "benthic.engine.process" in " ".join(p.cmdline()))
                    engine.kill()
        assert "[DONE]" not in "".join(lines)
        assert any("error" in line for line in lines[-4:]), lines[-4:]
        assert server.wait(30) != 0
        assert "engine" in server.output()
    finally:
        server.kill()


def test_a_killed_server_leaves_no_engine_and_no_socket():
    before = set(Path(tempfile.gettempdir()).glob("benthic-*/"))
    server = ServerProcess(*SMALL)
    try:
        server.wait_ready()
        family = server.family()
        assert set(Path(tempfile.gettempdir()).glob("benthic-*/")) - before
        server.process.kill()
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive
        assert not set(Path(tempfile.gettempdir()).glob("benthic-*/")) - before
    finally:
        server.kill()


def test_a_port_in_use_is_told_at_once():
    """Case G4."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output, _ = run_to_end(MODEL, "--port", str(port))
    assert code != 0
    assert_one_paragraph(output, str(port), "--port")
    code, output, _ = run_to_end(MODEL, "--host", "203.0.113.7", "--port", "0")
    assert code != 0
    assert_one_paragraph(output, "203.0.113.7")


def test_a_missing_model_folder(tmp_path: Path):
    code, output, _ = run_to_end(str(tmp_path / "nowhere"), "--port", "0")
    assert code != 0
    assert_one_paragraph(output, "nowhere")


def test_an_unknown_architecture(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"}))
    code, output, _ = run_to_end(str(tmp_path), "--port", "0")
    assert code != 0
    assert_one_paragraph(output, "BertForMaskedLM", "LlamaForCausalLM")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.99])
def test_a_gguf_cut_short(tmp_path: Path, share: float):
    from benthic.weights.locate import locate

    whole = locate(MODEL).path
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as source:
        cut.write_bytes(source.read(int(whole.stat().st_size * share)))
    code, output, _ = run_to_end(str(cut), "--port", "0")
    assert code != 0
    assert_one_paragraph(output, "cut.gguf")


def test_not_enough_memory_for_l1():
    code, output, _ = run_to_end(MODEL, "--port", "0", "--l1-size", "90000GiB", timeout_s=120)
    assert code != 0
    assert_one_paragraph(output, "--l1-size", "GiB")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--page-size", "48"), ("--page-size", "48")),
        (("--chunk-tokens", "100"), ("--chunk-tokens", "64")),
        (("--l1-size", "1GiB", "--l1-pages", "3"), ("--l1-size", "--l1-pages")),
        (("--l1-size", "lots"), ("--l1-size", "lots")),
        (("--dtype", "int3"), ("--dtype", "bfloat16")),
        (("--max-context", "99999"), ("--max-context", "8192")),
        (("--device", "cuda"), ("--device", "cpu")),
    ],
)
def test_flags_that_cannot_be_used(flags: tuple[str, ...], words: tuple[str, ...]):
    code, output, _ = run_to_end(MODEL, "--port", "0", *flags)
    assert code != 0
    assert_one_paragraph(output, *words)
