"""Clients of a tiny server that do everything at once: answers whole and in pieces, short and long, clients that go
away in every state, and flushes. Every answer is compared with the right one."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.support.floor_process import FloorServer, Prompt, Right, read_answer

SHORT, LONG = 6, 72  # tokens of an answer
GOES_S = 0.6  # the longest patience of a client that goes away before its answer
BOUND_S = 100.0  # whoever waits longer has been forgotten
LOOK_S = 0.5
DECK = {"answer": 8, "stream": 2, "long": 3, "long stream": 3, "gone": 2, "gone in stream": 2, "flush": 1}
FLUSHES = (("l1",), ("l1",), ("l1", "l2"), ("l1", "l2"), ("l1", "l2"), ("l1", "l2", "l3"))


@dataclass
class MixedLoad:
    """What all clients share, and what they have seen. `prompts` are long and get short answers, `growing` are short
    and get long ones: the server takes in more of these than it has pages for in the end."""

    server: FloorServer
    right: Right
    prompts: list[Prompt]
    growing: list[Prompt]
    clients: int = 10
    seed: int = 0
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[str] = field(default_factory=Counter)
    tick: int = 0  # the server's
    preemptions: int = 0
    over: bool = False

    def run(self, ticks: int, seconds: float) -> None:
        """Go on for so many ticks of the server and until everything has happened, but no longer than `seconds`, and
        only while nothing is wrong."""
        self.over = False
        asyncio.run(self._run(self.tick + ticks, time.monotonic() + seconds))

    @property
    def missing(self) -> list[str]:
        """What has not happened yet: a kind of request, a hit in a tier, a preemption."""
        missing = [what for what in DECK if not self.done[what]]
        missing += [f"hit in {tier}" for tier in ("l1", "l2", "l3") if not self.hit_tokens[tier]]
        return missing if self.preemptions else [*missing, "preemption"]

    async def _run(self, end_tick: int, end_s: float) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self.server.url, timeout=BOUND_S, verify=False, limits=limits) as http,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._watch(http, end_tick, end_s))
            for number in range(self.clients):
                tasks.create_task(self._client(http, random.Random(f"{self.seed}/{number}")))

    async def _watch(self, http: httpx.AsyncClient, end_tick: int, end_s: float) -> None:
        while not self.over:
            await asyncio.sleep(LOOK_S)
            state = (await http.get("/cache")).raise_for_status().json()
            self.tick, self.preemptions = state["tick"], state["preemptions"]
            enough = self.tick >= end_tick and not self.missing
            self.over = bool(self.wrong) or enough or time.monotonic() >= end_s

    async def _client(self, http: httpx.AsyncClient, dice: random.Random) -> None:
        deck: list[str] = []
        while not self.over:
            if not deck:
                deck = [what for what, count in DECK.items() for _ in range(count)]
                dice.shuffle(deck)
            what, prompt, growing = deck.pop(), dice.choice(self.prompts), dice.choice(self.growing)
            if what == "answer":
                await self._answer(http, prompt, SHORT)
            elif what == "long":
                await self._answer(http, growing, LONG)
            elif what == "stream":
                await self._stream(http, prompt, SHORT)
            elif what == "long stream":
                await self._stream(http, growing, LONG)
            elif what == "gone":
                await self._go(http, prompt, dice.uniform(0.0, GOES_S))
            elif what == "gone in stream":
                await self._stream(http, growing, LONG, leave_after=dice.randrange(1, LONG))
            else:
                response = await http.post("/cache/flush", json={"tiers": dice.choice(FLUSHES)})
                self._check(response.status_code == 200, response.text)
            self.done[what] += 1

    async def _answer(self, http: httpx.AsyncClient, prompt: Prompt, num_tokens: int) -> None:
        response = await http.post("/v1/completions", json=self.server.body(prompt, num_tokens))
        if response.status_code != 200:
            self.wrong.append(response.text)
            return
        answer = read_answer(response.json())
        self._check(answer.text == self.right(prompt, num_tokens), f"{answer} for {prompt[:4]}, {len(prompt)} tokens")
        for tier in ("l1", "l2", "l3"):
            self.hit_tokens[tier] += getattr(answer, tier)

    async def _stream(self, http: httpx.AsyncClient, prompt: Prompt, num_tokens: int, leave_after: int = 0) -> None:
        """An answer in pieces; with `leave_after` the client hangs up when it has so many."""
        text, pieces, last = "", 0, ""
        body = self.server.body(prompt, num_tokens) | {"stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                last = line or last
                if not line.startswith("data: {"):
                    continue
                told = json.loads(line.removeprefix("data: "))
                if "error" in told:
                    self.wrong.append(line)
                    return
                text += "".join(choice["text"] for choice in told["choices"])
                pieces += 1
                if pieces == leave_after:
                    break
        expected = self.right(prompt, num_tokens)
        if leave_after:
            self._check(expected.startswith(text), f"{text} begins a stream for {prompt[:4]}")
        else:
            self._check(text == expected and last == "data: [DONE]", f"{text}, {last}, streamed for {prompt[:4]}")

    async def _go(self, http: httpx.AsyncClient, prompt: Prompt, patience_s: float) -> None:
        post = http.post("/v1/completions", json=self.server.body(prompt, LONG))
        try:
            await asyncio.wait_for(post, patience_s)
        except TimeoutError:
            return

    def _check(self, holds: bool, words: str) -> None:
        if not holds:
            self.wrong.append(words)
