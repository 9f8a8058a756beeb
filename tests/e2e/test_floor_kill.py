"""kill -9 at random points under load, again and again: every start succeeds, every answer is right, no page wrong."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.floor_process import FloorServer, Prompt, Right, assert_whole, floor_flags, whole_pages

SLOTS = 260  # two thirds of what the prompts need: collecting goes on as well
LOAD = {"l1_pages": 120, "l2_frames": 150, "l3_slots": SLOTS}
CLIENTS = 4
HOW = ("all", "server", "engine")


@contextmanager
def clients(server: FloorServer, right: Right, prompts: list[Prompt], seed: int) -> Iterator[list[int]]:
    """Clients that send prompts for as long as the server lives; gives the pages found on disk, an entry an answer."""
    found: list[int] = []
    wrong: list[str] = []

    def client(dice: random.Random) -> None:
        while True:
            prompt = dice.choice(prompts)
            try:
                response = server.post("/v1/completions", server.body(prompt), timeout_s=60)
            except httpx.HTTPError:
                return  # it was killed
            body = response.json()
            if response.status_code != 200:
                if response.status_code < 500:  # the engine was killed, and the server says so
                    wrong.append(response.text)
                return
            if body["choices"][0]["text"] != right(prompt):
                wrong.append(f"{body} for {prompt[:8]}")
            found.append(body["usage"]["cached_tokens_by_tier"]["l3"])

    threads = [threading.Thread(target=client, args=(random.Random(f"{seed}/{i}"),)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        for thread in threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong, wrong


def kill(server: FloorServer, how: str) -> None:
    """kill -9 of the server, its engine or both at once; the other one ends by itself."""
    family = server.family()
    if how == "all":
        os.killpg(server.process.pid, signal.SIGKILL)
    elif how == "engine" and len(family) > 1:
        family[-1].kill()
    else:
        server.process.kill()
    server.process.wait(60)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=str)
def test_kill_9_under_load_never_costs_more_than_time(
    tiny: Path, right: Right, tmp_path: Path, rounds: int, start: Callable[..., FloorServer]
):
    floor = tmp_path / "kv"
    dice = random.Random(rounds)
    prompts = right.prompts(24, 16 * 16 + 3, seed=21)
    on_disk = 0
    for number in range(rounds):
        server = FloorServer(tiny, *floor_flags(floor, **LOAD))
        try:
            if number % 5 == 4:  # at some point of the start, which the next one must then take on from
                time.sleep(dice.uniform(0.5, 4))
                assert server.process.poll() is None, server.output()
            else:
                server.wait_ready()
                with clients(server, right, prompts, number) as found:
                    time.sleep(dice.uniform(0.1, 1.5))
                    kill(server, dice.choice(HOW))
                on_disk += sum(found)
        finally:
            server.kill()
        if number % 25 == 24:
            assert_whole(floor)
    assert_whole(floor)
    assert on_disk > 0  # else nothing of the above was put to the test

    last = start(*floor_flags(floor, **LOAD))
    for prompt in prompts:
        assert last.ask(prompt).text == right(prompt)
        last.wait_settled()
    assert last.ask(prompts[-1]).cached == whole_pages(prompts[-1])
    assert last.disk()["slots_retired"] == 0
    assert last.stop() == 0
    assert_whole(floor)
