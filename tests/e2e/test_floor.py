"""The disk floor over the life of servers: restarts, kills, a second server, other settings and policies (cases A3,
A9, A11).

What is found again is told by the usage, and every answer equals that of a fresh server without L2 and L3.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import FLAGS
from tests.support.floor_process import (
    FloorServer,
    Prompt,
    Right,
    assert_whole,
    floor_flags,
    kill_all,
    refused,
    verify,
    whole_pages,
)
from tests.support.server_process import ServerProcess
from tests.support.tiny_checkpoint import PAGE_TOKENS

Start = Callable[..., FloorServer]

LONG_TEXT = "The keeper of the lighthouse wrote down every ship, the weather and what he had for supper. " * 16


@pytest.mark.timeout(600)
def test_a_long_prompt_is_found_after_sigterm_and_after_kill_9(server: ServerProcess, tmp_path: Path):
    """The default model. The session's server, which has only L1, says what is right."""
    floor = tmp_path / "kv"
    flags = (*FLAGS, "--l2-size", "300MiB", "--l3-dir", str(floor), "--l3-size", "400MiB")
    want = server.complete(LONG_TEXT, ignore_eos=True)
    num_tokens = want["usage"]["prompt_tokens"]
    found = []
    for end in ("sigterm", "kill", "sigterm"):
        restarted = ServerProcess(*flags)
        try:
            restarted.wait_ready()
            got = restarted.complete(LONG_TEXT, ignore_eos=True)
            assert got["choices"][0]["text"] == want["choices"][0]["text"]
            found.append(got["usage"]["cached_tokens_by_tier"])
            if end == "sigterm":
                assert restarted.stop() == 0, restarted.output()
            else:
                kill_all(restarted)
        finally:
            restarted.kill()
    nearly_all = {"l1": 0, "l2": 0, "l3": (num_tokens - 1) // 16 * 16}
    assert found == [{"l1": 0, "l2": 0, "l3": 0}, nearly_all, nearly_all]
    assert_whole(floor)


def test_what_cache_shows_as_durable_survives_kill_9(start: Start, right: Right, tmp_path: Path):
    prompts = right.prompts(6, 300, seed=1)
    first = start(*floor_flags(tmp_path / "kv"))
    for prompt in prompts:
        assert first.ask(prompt).text == right(prompt)
    state = first.wait_settled()
    assert state["tiers"]["l3"]["durable_pages"] >= 6 * 18
    kill_all(first)
    assert_whole(tmp_path / "kv")

    second = start(*floor_flags(tmp_path / "kv"))
    for prompt in prompts:
        answer = second.ask(prompt)
        assert answer.text == right(prompt)
        assert answer.l3 == answer.cached == whole_pages(prompt)
    state = second.wait_settled()
    assert state["tiers"]["l3"]["reload_pages"] == 6 * 18
    assert state["hit_tokens"] == {"l1": 0, "l2": 0, "l3": 6 * 18 * PAGE_TOKENS}
    assert second.stop() == 0


def test_each_tier_gives_what_the_one_above_has_lost(start: Start, right: Right, tmp_path: Path):
    """L1 holds two of the prompts, L2 four, L3 all of them."""
    prompts = right.prompts(8, 16 * 40, seed=2)
    small = start(*floor_flags(tmp_path / "kv", l1_pages=100, l2_frames=180))
    tiers = []
    for _ in range(3):
        for prompt in prompts:
            answer = small.ask(prompt)
            assert answer.text == right(prompt)
            tiers.append(answer)
        small.wait_settled()
    answer = small.ask(prompts[-3])  # evicted from L1 by the two after it, not yet from L2
    assert (answer.text, answer.l1 + answer.l2, answer.l3) == (right(prompts[-3]), whole_pages(prompts[-3]), 0)
    assert answer.l2 > 0
    assert all(answer.cached == 0 for answer in tiers[:8])
    assert all(answer.l3 > 0 and answer.cached == whole_pages(prompts[0]) for answer in tiers[8:])
    state = small.wait_settled()
    hits = state["hit_tokens"]
    assert sum(hits.values()) == answer.cached + sum(answer.cached for answer in tiers)
    assert small.stop() == 0
    assert_whole(tmp_path / "kv")


def test_a_full_floor_keeps_the_newest_and_stays_within_its_budget(start: Start, right: Right, tmp_path: Path):
    """Three times as much as fits."""
    prompts = right.prompts(24, 16 * 20 + 1, seed=3)
    server = start(*floor_flags(tmp_path / "kv", l3_slots=160, l1_pages=60, l2_frames=64))
    for prompt in prompts:
        assert server.ask(prompt).text == right(prompt)
        server.wait_settled()
    disk = server.disk()
    assert disk["slots_used"] <= disk["slots_total"] < 24 * 20 // 2
    assert disk["collected_pages"] >= 24 * 20 - disk["slots_total"]
    budget = int(floor_flags(tmp_path, l3_slots=160)[7])
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert taken <= budget
    assert server.ask(prompts[-2]).cached == whole_pages(prompts[-2])
    assert server.stop() == 0
    again = start(*floor_flags(tmp_path / "kv", l3_slots=160, l1_pages=60, l2_frames=64))
    answer = again.ask(prompts[-1])
    assert (answer.text, answer.l3) == (right(prompts[-1]), whole_pages(prompts[-1]))
    assert again.ask(prompts[0]).cached == 0
    assert again.stop() == 0
    assert_whole(tmp_path / "kv")


def test_another_dtype_or_page_size_never_meets_the_first_ones_pages(start: Start, right: Right, tmp_path: Path):
    """Case A3."""
    prompts = right.prompts(3, 400, seed=4)
    floor = tmp_path / "kv"
    own = floor_flags(floor)
    for changed in ((), ("--dtype", "bfloat16"), ("--page-size", "32"), ()):
        server = start(*own, *changed)
        for prompt in prompts:
            answer = server.ask(prompt)
            if not changed and server.l3()["disks"][0]["reloaded_pages"]:
                assert answer.l3 == whole_pages(prompt)
            else:
                assert answer.cached == 0
            if "bfloat16" not in changed:  # there nothing was found, so that it is what a fresh server computes
                assert answer.text == right(prompt)
        if changed:
            assert "L3, another model's" in server.output()
        hits = server.wait_settled()["hit_tokens"]["l3"]
        assert server.stop() == 0
    assert hits == sum(whole_pages(prompt) for prompt in prompts)
    listed = subprocess.run(
        [sys.executable, "-m", "benthic", "cache", "ls", str(floor)], capture_output=True, text=True, check=True
    )
    assert listed.stdout.count("1 ") >= 3
    assert_whole(floor)


@contextmanager
def other_ways(folder: Path, tmp_path: Path) -> Iterator[list[Path]]:
    """The folder itself, through a symbolic link, and through a bind mount where mounting is allowed."""
    link, bound = tmp_path / "link", tmp_path / "bound"
    link.symlink_to(folder)
    bound.mkdir()
    mounted = subprocess.run(["mount", "--bind", folder, bound], capture_output=True, check=False).returncode == 0
    try:
        yield [folder, link, *([bound] if mounted else [])]
    finally:
        if mounted:
            subprocess.run(["umount", bound], check=True)


def test_a_second_server_on_the_folder_is_refused_and_harms_nothing(
    start: Start, right: Right, tiny: Path, tmp_path: Path
):
    """Case A9: directly, through a link, through a bind mount; then the first is killed and started at once."""
    prompt = right.prompts(1, 300, seed=5)[0]
    floor = tmp_path / "kv"
    first = start(*floor_flags(floor))
    assert first.ask(prompt).text == right(prompt)
    first.wait_settled()
    with other_ways(floor, tmp_path) as ways:
        for way in ways:
            output = refused(tiny, *floor_flags(way))
            assert str(first.process.pid) in output
            assert "weights" not in output
        code, output = verify(floor)
        assert code != 0
        assert str(first.process.pid) in output
    assert first.ask(prompt).cached == whole_pages(prompt)

    os.killpg(first.process.pid, signal.SIGKILL)
    second = start(*floor_flags(floor))  # at once: the dead engine may still be ending
    assert second.ask(prompt).l3 == whole_pages(prompt)
    assert second.stop() == 0
    assert_whole(floor)


def ask_tails(server: FloorServer, right: Right, tails: list[Prompt], head: Prompt) -> None:
    """Each tail below the head, which is asked for in between and so stays in L1."""
    for number, tail in enumerate(tails):
        assert server.ask(tail).text == right(tail)
        if number % 4 == 0:
            server.ask(head)
        if number % 16 == 15:
            server.wait_settled()


@pytest.mark.parametrize(
    "policy", ["write_through", pytest.param("write_through_selective", marks=pytest.mark.slow), "write_back"]
)
@pytest.mark.parametrize("num_tails", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_a_tail_on_disk_has_its_head_there(start: Start, right: Right, tmp_path: Path, policy: str, num_tails: int):
    """Case A11."""
    head = right.prompts(1, 2048, seed=6)[0]
    tails = right.prompts(num_tails, 2048 + 100, seed=7, head=head)
    flags = floor_flags(
        tmp_path / "kv", l1_pages=220, l2_frames=260, l3_slots=3000, extra=("--l2-policy", policy.replace("_", "-"))
    )
    first = start(*flags)
    first.ask(head)
    ask_tails(first, right, tails, head)
    assert first.stop() == 0, first.output()
    assert_whole(tmp_path / "kv")

    again = start(*floor_flags(tmp_path / "kv", l1_pages=2500, l2_frames=2500, l3_slots=3000))
    durable = again.disk()["slots_used"]
    for tail in reversed(tails):
        answer = again.ask(tail)
        assert answer.text == right(tail)
        if policy == "write_through":
            assert answer.cached == whole_pages(tail)
            assert answer.l3 > 0
    # A look-up stops at the first page that is missing: that all came back means that each had its ancestors there.
    assert again.wait_settled()["tiers"]["l3"]["reload_pages"] == durable
    if policy == "write_through":
        assert durable == 128 + num_tails * 6
    assert again.stop() == 0
