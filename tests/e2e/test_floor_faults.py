"""The disk fails, fills up, hangs or refuses while a server runs on it (cases A5, A7, A10): the answers stay right, and
`/cache`, the metrics and one line of the log say what happened."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benthic.tiers.disk.stats import RATE_HOLDS_S
from tests.support.faulty_engine import Rule, Rules
from tests.support.floor_process import (
    FILLED_SLOTS,
    FloorServer,
    Prompt,
    Right,
    assert_whole,
    config_flags,
    floor_flags,
    is_reading,
    refused,
    whole_pages,
)

Start = Callable[..., FloorServer]
SLAB = "slab-0.dat"
READS_HANG = Rule(name="preadv", path=SLAB, delay_s=600)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 32 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", disk], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # a server that a failed test left is still on it


def taken_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def fill_up(path: Path) -> None:
    """Leave no byte free on the disk."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            continue


def lines_with(text: str, words: str) -> int:
    return sum(words in line for line in text.splitlines())


def metric(server: FloorServer, name: str) -> float:
    """The sum of a series over its labels."""
    text = httpx.get(server.url + "/metrics", timeout=30, verify=False).text
    found = [line for line in text.splitlines() if line.startswith((f"benthic_{name}{{", f"benthic_{name} "))]
    assert found, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_a_full_disk_costs_the_floor_and_no_answer(small_disk: Path, start: Start, right: Right, tiny: Path):
    """Case A5, and A7 (a): tmpfs, where the pages are found again after a restart."""
    floor = small_disk / "kv"
    output = refused(tiny, *floor_flags(floor, l3_slots=2000))
    assert "MiB is asked for, but only 32.00 MiB can be had" in output.replace("31.99", "32.00")
    assert "--l3-size" in output
    assert "weights" not in output

    flags = floor_flags(floor, l3_slots=700, l1_pages=300, l2_frames=300)
    budget = int(flags[flags.index("--l3-size") + 1])
    server = start(*flags)
    fill = small_disk / "somebody-elses"
    fill_up(fill)
    prompts = right.prompts(8, 800, seed=32)
    for prompt in prompts[:4]:
        assert server.ask(prompt).text == right(prompt)
        server.wait_settled()
    full = server.l3()
    fill.unlink()
    for prompt in prompts[4:]:
        assert server.ask(prompt).text == right(prompt)
    server.wait_settled()
    after = server.l3()
    assert taken_bytes(floor) <= budget
    assert full["disks"][0]["write_errors"] == 0 or full["disks"][0]["last_error"]
    resumed = after["durable_pages"] > full["durable_pages"]
    assert resumed or "make room" in (after["disks"][0]["out_of_service"] or "") or after["spill_suspended"]
    assert server.stop() == 0
    assert lines_with(server.output(), "ENOSPC") <= 4

    again = start(*flags)
    answer = again.ask(prompts[-1] if resumed else prompts[0])
    assert answer.text == right(prompts[-1] if resumed else prompts[0])
    if resumed:
        assert answer.l3 == whole_pages(prompts[-1])
    assert again.stop() == 0
    assert_whole(floor)


def test_a_slab_without_room_is_out_of_service_and_says_how_it_comes_back(
    start: Start, right: Right, rules: Rules, tmp_path: Path
):
    """Case A5 where blocks that were reserved are refused nevertheless, as copy-on-write filesystems do."""
    server = start(*floor_flags(tmp_path / "kv"), rules=rules)
    rules.set(Rule(name="pwritev", path=SLAB, errno="ENOSPC"))
    prompts = right.prompts(12, 300, seed=33)
    for prompt in prompts:
        assert server.ask(prompt).text == right(prompt)
    disk = server.wait_for(lambda state: state["tiers"]["l3"]["disks"][0]["out_of_service"])["tiers"]["l3"]["disks"][0]
    assert "ENOSPC" in disk["out_of_service"]
    assert "make room" in disk["out_of_service"]
    assert disk["slots_retired"] == 0
    server.wait_settled()
    assert metric(server, "l3_out_of_service") == 1
    assert metric(server, "l3_write_errors_total") >= 8
    assert lines_with(server.output(), "write of slot") == 1  # at most one a period
    assert server.stop() == 0
    assert_whole(tmp_path / "kv")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spills_resume_when_there_is_room_again(start: Start, right: Right, rules: Rules, tmp_path: Path):
    server = start(*floor_flags(tmp_path / "kv"), rules=rules)
    rules.set(Rule(name="pwritev", path=SLAB, errno="ENOSPC"))
    prompts = right.prompts(40, 300, seed=34)
    for prompt in prompts[:12]:
        assert server.ask(prompt).text == right(prompt)
    server.wait_for(lambda state: state["tiers"]["l3"]["disks"][0]["out_of_service"])
    rules.set()
    end = time.monotonic() + 400
    for prompt in prompts[12:]:
        assert server.ask(prompt).text == right(prompt)
        if not server.disk()["out_of_service"] and not server.l3()["spill_suspended"]:
            break
        time.sleep(10)
    assert time.monotonic() < end
    last = server.wait_settled()["tiers"]["l3"]["durable_pages"]
    extra = right.prompts(1, 400, seed=35)[0]
    assert server.ask(extra).text == right(extra)
    assert server.wait_settled()["tiers"]["l3"]["durable_pages"] > last
    assert server.stop() == 0
    assert_whole(tmp_path / "kv")


def test_errors_of_reads_are_misses_and_of_writes_end_the_writing(
    start: Start, right: Right, rules: Rules, known: list[Prompt], floor: Path
):
    server = start(*floor_flags(floor, l3_slots=FILLED_SLOTS), rules=rules)
    rules.set(Rule(name="preadv", path=SLAB, errno="EIO"))
    answer = server.ask(known[0])
    assert (answer.text, answer.cached) == (right(known[0]), 0)
    assert server.disk()["read_failures"]["io"] >= 1
    rules.set()
    assert server.ask(known[0]).text == right(known[0])
    # behind the start all headers are read: of an old page the errors may have cost more than what was asked for
    fresh = right.prompts(1, 300, seed=38)[0]
    assert server.ask(fresh).text == right(fresh)
    server.wait_settled()

    rules.set(Rule(name="pwritev", path=SLAB, errno="EIO"))
    for prompt in right.prompts(12, 300, seed=36):
        assert server.ask(prompt).text == right(prompt)
    state = server.wait_for(lambda state: state["tiers"]["l3"]["disks"][0]["out_of_service"])
    disk = state["tiers"]["l3"]["disks"][0]
    assert "EIO" in disk["out_of_service"]
    assert "restart" in disk["out_of_service"]
    assert SLAB in disk["last_error"]
    server.wait_settled()
    assert metric(server, "l3_out_of_service") == 1
    assert metric(server, "l3_read_failures_total") >= 1
    assert server.post("/cache/flush", {"tiers": ["l1", "l2"]}).status_code == 200
    answer = server.ask(fresh)  # reads go on
    assert (answer.text, answer.l3) == (right(fresh), whole_pages(fresh))
    server.wait_settled()
    assert server.stop() == 0

    again = start(*floor_flags(floor, l3_slots=FILLED_SLOTS))
    assert again.ask(fresh).l3 == whole_pages(fresh)
    assert again.stop() == 0
    assert_whole(floor)


def test_what_a_filesystem_cannot_do_is_said_once_and_done_otherwise(
    start: Start, right: Right, rules: Rules, tmp_path: Path
):
    """Case A7 (c, d): O_DIRECT accepted at open and refused at a write, and no preallocation."""
    rules.set(
        Rule(name="pwritev", path=SLAB, errno="EINVAL", direct=True),
        Rule(name="preallocate", path=SLAB, errno="EOPNOTSUPP"),
    )
    prompts = right.prompts(2, 400, seed=37)
    flags = floor_flags(tmp_path / "kv")
    first = start(*flags, rules=rules)
    for prompt in prompts:
        assert first.ask(prompt).text == right(prompt)
    first.wait_settled()
    assert not first.disk()["direct"]
    assert first.disk()["write_errors"] == 0
    assert first.stop() == 0
    output = " ".join(first.output().split())
    assert output.count("O_DIRECT refused (errno 22") == 1
    assert output.count("can't preallocate (errno 95") == 1

    second = start(*flags, rules=rules)
    for prompt in prompts:
        answer = second.ask(prompt)
        assert (answer.text, answer.l3) == (right(prompt), whole_pages(prompt))
    assert second.stop() == 0
    assert_whole(tmp_path / "kv")


@pytest.mark.slow
def test_a_floor_on_an_overlay(start: Start, right: Right, tmp_path: Path):
    """Case A7 (b)."""
    parts = {name: tmp_path / name for name in ("lower", "upper", "work", "merged")}
    for part in parts.values():
        part.mkdir()
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
    if subprocess.run(["mount", "-t", "overlay", "none", "-o", options, parts["merged"]], check=False).returncode:
        pytest.skip("mounting an overlay is not allowed here")
    try:
        prompt = right.prompts(1, 400, seed=38)[0]
        for found in (0, whole_pages(prompt)):
            server = start(*floor_flags(parts["merged"] / "kv"))
            answer = server.ask(prompt)
            assert (answer.text, answer.l3) == (right(prompt), found)
            assert server.stop() == 0
        assert_whole(parts["merged"] / "kv")
    finally:
        subprocess.run(["umount", parts["merged"]], check=True)


def test_a_folder_below_a_file_is_refused(tiny: Path, tmp_path: Path):
    """Case A7 (e)."""
    (tmp_path / "file").write_text("here first")
    output = refused(tiny, *floor_flags(tmp_path / "file" / "kv"))
    assert f"{tmp_path}/file" in output.replace("\n", "")
    assert "--l3-dir" in output
    assert "weights" not in output


def test_a_disk_that_hangs_holds_up_nobody_for_longer_than_the_bound(
    start: Start, right: Right, rules: Rules, known: list[Prompt], floor: Path
):
    """Case A10. Reads hang until the test lets them go, so that whatever is answered before did not wait for them."""
    server = start(*config_flags(floor, timeout_s=6), rules=rules)
    answer = server.ask(known[0])  # how fast the disk reads is known, and the check of the headers is over
    assert answer.l3 == whole_pages(known[0])
    before = server.wait_settled()
    rules.set(READS_HANG)
    unknown = right.prompts(8, 40, seed=39)
    with ThreadPoolExecutor(9) as pool:
        held = pool.submit(server.ask, known[1])
        server.wait_for(is_reading)
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/completions", server.body(known[2]), timeout_s=0.5)  # this client leaves
        for prompt, got in zip(unknown, pool.map(server.ask, unknown), strict=True):
            assert got.text == right(prompt)
        assert server.get("/cache")["requests"]["held"] == 1  # eight unknown prompts went past it
        answer = held.result(120)
    assert (answer.text, answer.cached) == (right(known[1]), 0)
    state = server.get("/cache")
    assert state["tiers"]["l3"]["reload_timeouts"] > before["tiers"]["l3"]["reload_timeouts"]
    assert state["tiers"]["l2"]["quarantined_frames"] > 0
    rules.set()
    server.wait_settled()  # the late reads have given their frames back
    assert metric(server, "l3_reload_timeouts_total") >= 1
    assert server.ask(known[2]).text == right(known[2])
    server.wait_settled()
    assert server.stop() == 0
    assert_whole(floor)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("delay_s", [5.0, 30.0])
def test_a_disk_that_hangs_for_a_while(
    start: Start, right: Right, rules: Rules, known: list[Prompt], floor: Path, delay_s: float
):
    """Case A10 with the bounds as they are by default, writes and syncs as slow as reads, and more than one client."""
    server = start(*floor_flags(floor, l3_slots=FILLED_SLOTS), rules=rules)
    rules.set(*(Rule(name=name, path=SLAB, delay_s=delay_s) for name in ("preadv", "pwritev", "fdatasync")))
    unknown = right.prompts(8, 300, seed=40)
    asked = [*known[:3], known[0], *unknown]
    with ThreadPoolExecutor(len(asked)) as pool:
        for prompt, got in zip(asked, pool.map(server.ask, asked), strict=True):
            assert got.text == right(prompt)
    assert server.l3()["reload_timeouts"] >= 1
    for prompt in known[3:]:
        assert server.ask(prompt).text == right(prompt)
    rules.set()
    server.wait_settled(120)
    time.sleep(RATE_HOLDS_S)  # so long the disk is thought to be slow, and what it has is computed
    assert server.post("/cache/flush", {}).status_code == 200
    answer = server.ask(known[0])
    assert (answer.text, answer.l3) == (right(known[0]), whole_pages(known[0]))
    disk = server.disk()
    assert disk["out_of_service"] is None
    assert disk["slots_retired"] == 0
    assert server.stop() == 0
    assert_whole(floor)


def test_a_stop_does_not_wait_for_a_disk_that_hangs(start: Start, right: Right, rules: Rules, tmp_path: Path):
    """SIGTERM while writes hang: the grace time bounds it, and the terminal says what was not written."""
    server = start(*floor_flags(tmp_path / "kv"), "--grace-s", "2", rules=rules)
    rules.set(Rule(name="pwritev", path=SLAB, delay_s=600))
    prompt = right.prompts(1, 300, seed=41)[0]
    assert server.ask(prompt).text == right(prompt)
    waker = threading.Timer(25, rules.set)  # a write that the system does not give back can hold up a process's end
    waker.start()
    try:
        assert server.stop() == 0
        assert waker.is_alive()
    finally:
        waker.cancel()
    assert "19 pages were not on disk" in " ".join(server.output().split())
    assert_whole(tmp_path / "kv")
