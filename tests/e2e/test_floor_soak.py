"""A working set five times as big as L1 and L2 together, 32 clients, minutes: answers, books, memory and patience."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.floor_process import FloorServer, Prompt, Right, assert_whole, floor_flags, read_answer

L1_PAGES, L2_FRAMES, L3_SLOTS = 160, 200, 2400
HEADS, TAILS, HEAD_TOKENS, TOKENS = 12, 12, 96, 16 * 18 + 9
CLIENTS = 32
BOUND_S = 60.0  # a request that waits longer than this has been forgotten
LEAVES, FLUSHES = 0.03, 0.002  # of the requests


class Clients:
    """What all clients share: the prompts, and what went wrong."""

    def __init__(self, server: FloorServer, right: Right, prompts: list[Prompt], until: float) -> None:
        self.server, self.right, self.prompts, self.until = server, right, prompts, until
        self.wrong: list[str] = []
        self.tokens = {"l1": 0, "l2": 0, "l3": 0}
        self.num_answers = 0

    async def run(self) -> None:
        """32 clients until the time is over."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=BOUND_S, verify=False) as http:
            await asyncio.gather(*(self._client(http, random.Random(number)) for number in range(CLIENTS)))

    async def _client(self, http: httpx.AsyncClient, dice: random.Random) -> None:
        while time.monotonic() < self.until:
            prompt = dice.choice(self.prompts)
            body = self.server.body(prompt)
            chance = dice.random()
            if chance < LEAVES:
                try:
                    post = http.post("/v1/completions", json=body | {"max_tokens": 100})
                    await asyncio.wait_for(post, dice.uniform(0, 0.5))
                except TimeoutError:
                    continue
            elif chance < LEAVES + FLUSHES:
                response = await http.post("/cache/flush", json={})
                assert response.status_code == 200, response.text
            else:
                self._judge(prompt, await http.post("/v1/completions", json=body))

    def _judge(self, prompt: Prompt, response: httpx.Response) -> None:
        if response.status_code != 200:
            self.wrong.append(response.text)
            return
        answer = read_answer(response.json())
        if answer.text != self.right(prompt):
            self.wrong.append(f"{answer} for {prompt[:8]}")
        for tier in self.tokens:
            self.tokens[tier] += getattr(answer, tier)
        self.num_answers += 1


def measure(server: FloorServer) -> list[dict[str, int]]:
    """Memory, file handles and threads of the server and its engine."""
    found = []
    for process in server.family():
        memory = process.memory_full_info()
        found.append({"bytes": memory.uss, "handles": process.num_fds(), "threads": process.num_threads()})
    return found


def assert_flat(first: list[dict[str, int]], last: list[dict[str, int]]) -> None:
    """Neither process has grown by more than rounding and malloc's holes explain."""
    for before, after in zip(first, last, strict=True):
        assert after["bytes"] - before["bytes"] < max(16 << 20, before["bytes"] // 10), (first, last)
        assert abs(after["handles"] - before["handles"]) <= 2, (first, last)
        assert after["threads"] == before["threads"], (first, last)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seconds", [60, 600])
def test_a_working_set_five_times_as_big(tiny: Path, right: Right, tmp_path: Path, seconds: int, policy: str):
    prompts: list[Prompt] = []
    for number in range(HEADS):
        head = right.prompts(1, HEAD_TOKENS, seed=71 + number)[0]
        prompts += right.prompts(TAILS, TOKENS, seed=171 + number, head=head)
    pages = HEADS * (HEAD_TOKENS // 16 + TAILS * (TOKENS - HEAD_TOKENS) // 16)
    assert pages >= 5 * (L1_PAGES + L2_FRAMES)
    flags = floor_flags(tmp_path / "kv", l1_pages=L1_PAGES, l2_frames=L2_FRAMES, l3_slots=L3_SLOTS)
    server = FloorServer(tiny, *flags, "--l2-policy", policy)
    try:
        server.wait_ready()
        asyncio.run(Clients(server, right, prompts, time.monotonic() + seconds / 3).run())
        state = settled(server)
        marks = [measure(server)]
        clients = Clients(server, right, prompts, time.monotonic() + seconds * 2 / 3)
        asyncio.run(clients.run())
        assert not clients.wrong, clients.wrong[:3]
        assert clients.num_answers > seconds
        assert all(clients.tokens.values()), clients.tokens
        assert_counted(state, settled(server), clients)
        marks.append(measure(server))
        assert_flat(*marks)
        assert server.post("/cache/flush", {}).json()["kept"] == {"l1": 0, "l2": 0}
        assert server.stop() == 0
    finally:
        server.kill()
    assert_whole(tmp_path / "kv")


def settled(server: FloorServer) -> dict[str, Any]:
    """The quiet state, after malloc has given back what it holds free."""
    server.wait_settled()
    time.sleep(12)
    return server.wait_settled()


def assert_counted(before: dict[str, Any], after: dict[str, Any], clients: Clients) -> None:
    """The server's counters hold what the clients were told, and no more than those who left had."""
    for tier, tokens in clients.tokens.items():
        counted = after["hit_tokens"][tier] - before["hit_tokens"][tier]
        assert tokens <= counted
    assert after["tiers"]["l3"]["disks"][0]["write_errors"] == 0
    assert not any(after["tiers"]["l3"]["disks"][0]["read_failures"][kind] for kind in ("io", "checksum", "torn"))
