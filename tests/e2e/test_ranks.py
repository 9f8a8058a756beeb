"""A server of several rank processes: answers, tiers and restarts as with one (cases E1, H1), and its end when a rank
dies, hangs or can't start (case E3)."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.floor_process import FloorServer, Prompt, Right, assert_whole, floor_flags, whole_pages
from tests.support.server_process import ServerProcess
from tests.support.tiny_checkpoint import PAGE_TOKENS

Start = Callable[..., FloorServer]

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
END_S = 30.0  # from a rank's death or halt to the server's end: the beats' bound of 10 s, and the way out


@pytest.fixture(autouse=True)
def nothing_left(right: Right, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No segment and no folder of sockets outlives the servers of a test; that of `right` is elsewhere."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    before = set(Path("/dev/shm").glob("benthic-*"))
    yield
    assert not list(folder.glob("benthic-*"))
    assert set(Path("/dev/shm").glob("benthic-*")) <= before


def ranks_of(server: ServerProcess) -> list[psutil.Process]:
    """The rank processes, by rank."""
    found = [p for p in server.family()[1:] if "engine" in " ".join(p.cmdline())]
    return sorted(found, key=lambda p: p.pid)


def stream_until_end(server: FloorServer, prompt: Prompt, after: int, then: Callable[[], None]) -> list[str]:
    """A long stream's lines; `then` is called once so many have come."""
    lines: list[str] = []
    body = server.body(prompt, max_tokens=2500) | {"stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == after:
                then()
    return lines


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4])
def test_answers_and_tiers_are_one_ranks_and_the_floor_serves_any_number_of_ranks(
    size: int, start: Start, right: Right, tmp_path: Path
):
    whole = 2 * size * PAGE_TOKENS
    lengths = (1, PAGE_TOKENS - 1, PAGE_TOKENS, whole - 1, whole, whole + 1, 2500)
    prompts = [right.prompts(1, length, seed=700 + length)[0] for length in lengths]
    floor = tmp_path / "kv"
    server = start(*floor_flags(floor), "--cp", str(size), env={**ONE_THREAD, "BENTHIC_PLACEMENT_ASSERT": "1"})
    assert len(ranks_of(server)) == size
    began = time.monotonic()
    for again in (False, True):
        for prompt in prompts:
            answer = server.ask(prompt)
            assert answer.text == right(prompt)
            assert answer.l1 == (whole_pages(prompt) if again else 0)
    assert time.monotonic() - began < 60
    server.wait_settled()
    assert server.post("/cache/flush", {"tiers": ["l1"]}).json()["dropped_pages"] > 0
    long = prompts[-1]
    assert (answer := server.ask(long)).text == right(long)
    assert answer.l2 == whole_pages(long)
    assert {disk["rank"] for disk in server.l3()["disks"]} == set(range(size))
    server.wait_settled()
    assert server.stop() == 0, server.output()
    assert_whole(floor)
    for other in (3, 1, 2) if size == 2 else (2,):
        server = start(*floor_flags(floor), *(("--cp", str(other)) if other > 1 else ()), env=ONE_THREAD)
        answer = server.ask(long)
        assert answer.text == right(long)
        assert answer.l3 == whole_pages(long), other
        server.wait_settled()
        assert server.stop() == 0, server.output()
    assert_whole(floor)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_halts_ends_the_server_by_name(
    how: signal.Signals, start: Start, right: Right, tmp_path: Path
):
    prompt = right.prompts(1, 300, seed=5)[0]
    flags = (*floor_flags(tmp_path / "kv"), "--cp", "2")
    server = start(*flags, env=ONE_THREAD)
    assert server.ask(prompt).text == right(prompt)
    server.wait_settled()
    family = server.family()
    began: list[float] = []

    def strike() -> None:
        began.append(time.monotonic())
        ranks_of(server)[1].send_signal(how)

    seen: list[int] = []
    watching = threading.Thread(target=watch_health, args=(server.url, seen))
    watching.start()
    lines = stream_until_end(server, prompt, 10, strike)
    assert server.wait(END_S) == 1, server.output()
    watching.join()
    assert time.monotonic() - began[0] < END_S
    text = "".join(lines)
    assert "[DONE]" not in text
    assert '"finish_reason":"' not in text.replace(" ", "")
    assert "error" in lines[-1] or "error" in lines[-2], lines[-4:]
    assert "rank 1" in server.output().splitlines()[-1] or "rank 1" in " ".join(server.output().splitlines()[-4:])
    assert ("SIGKILL" in server.output()) == (how is signal.SIGKILL)
    assert 503 in seen or seen[-1] != 200, seen[-5:]
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    again = start(*flags, env=ONE_THREAD)
    answer = again.ask(prompt)
    assert answer.text == right(prompt)
    assert answer.l3 == whole_pages(prompt)
    assert again.stop() == 0, again.output()
    assert_whole(tmp_path / "kv")


def watch_health(url: str, seen: list[int]) -> None:
    """The status codes of /health until nobody listens any more."""
    while True:
        try:
            seen.append(httpx.get(url + "/health", timeout=5).status_code)
        except httpx.HTTPError:
            seen.append(0)
            return
        time.sleep(0.05)


@pytest.mark.timeout(120)
def test_a_rank_that_cant_load_stops_the_start_with_its_reason(tiny: Path, tmp_path: Path):
    server = FloorServer(
        tiny, *floor_flags(tmp_path / "kv"), "--cp", "2", first=("--unreadable-on", "1"), env=ONE_THREAD
    )
    try:
        family = server.family()
        assert server.wait(60) == 1
        assert "rank 1" in server.output()
        assert "model.safetensors: can't be read" in server.output()
        assert "Traceback" not in server.output()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
    finally:
        server.kill()


@pytest.mark.timeout(120)
def test_numbers_are_not_multiplied_by_the_ranks(start: Start, right: Right, tmp_path: Path):
    """Case H1."""
    prompts = right.prompts(3, 200, seed=31)
    server = start(*floor_flags(tmp_path / "kv"), "--cp", "4", env=ONE_THREAD)
    answers: list[httpx.Response] = []

    def ask(prompt: Prompt) -> None:
        answers.append(server.post("/v1/completions", server.body(prompt, max_tokens=250)))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    server.wait_for(lambda state: state["requests"]["running"] == 3)
    time.sleep(1.5)  # metrics are told about once a second
    assert total(server, "benthic_requests_running") == 3
    for thread in threads:
        thread.join()
    server.wait_settled()
    time.sleep(1.5)
    usages = [answer.json()["usage"] for answer in answers]
    assert total(server, "benthic_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert total(server, "benthic_generated_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert total(server, "benthic_requests_running") == 0
    for name in ("benthic_l1_capacity_pages", "benthic_l2_capacity_frames", "benthic_l3_capacity_slots"):
        assert sorted(labels["cp_rank"] for labels, _ in series(server, name)) == ["0", "1", "2", "3"], name
    assert server.stop() == 0, server.output()


def series(server: ServerProcess, name: str) -> list[tuple[dict[str, str], float]]:
    text = httpx.get(server.url + "/metrics", timeout=30).text
    families = text_string_to_metric_families(text)
    return [(s.labels, s.value) for family in families for s in family.samples if s.name == name]


def total(server: ServerProcess, name: str) -> float:
    found = series(server, name)
    assert found, name
    return sum(value for _, value in found)


@pytest.mark.timeout(120)
def test_ctrl_c_lets_the_stream_finish_on_all_ranks_and_tensor_parallel_ranks_keep_their_floors(
    start: Start, right: Right, tmp_path: Path
):
    prompt = right.prompts(1, 300, seed=8)[0]
    flags = (*floor_flags(tmp_path / "kv"), "--tp", "2")
    server = start(*flags, env=ONE_THREAD)
    assert server.ask(prompt).text == right(prompt)
    answers: list[httpx.Response] = []
    body = server.body(prompt, max_tokens=120)
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    server.wait_for(lambda state: state["requests"]["running"] == 1)
    family = server.family()
    os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: the ranks get it too
    assert server.wait(60) == 0, server.output()
    thread.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 120
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    again = start(*flags, env=ONE_THREAD)
    answer = again.ask(prompt)
    assert answer.text == right(prompt)
    assert answer.l3 == whole_pages(prompt)
    assert again.stop() == 0
