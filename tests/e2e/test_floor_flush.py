"""`POST /cache/flush` while work goes on (case C5)."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.faulty_engine import Rule, Rules
from tests.support.floor_process import FloorServer, Prompt, Right, assert_whole, config_flags, whole_pages
from tests.support.tiny_checkpoint import PAGE_TOKENS

SLAB = "slab-0.dat"
STREAM_TOKENS = 100
EMPTY_L1_L2 = {"l1": 0, "l2": 0}


def stream(server: FloorServer, prompt: Prompt) -> str:
    """The text of a streamed answer."""
    text = ""
    body = server.body(prompt, STREAM_TOKENS) | {"stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120, verify=False) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def flush(server: FloorServer, *tiers: str) -> dict[str, Any]:
    """The answer to a flush, which must succeed."""
    response = server.post("/cache/flush", {"tiers": list(tiers)} if tiers else {})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["dropped_pages"] == sum(answer["dropped"].values())
    assert answer["kept_pages"] == sum(answer["kept"].values())
    return answer


def is_busy(state: dict[str, Any]) -> bool:
    """Whether eight streams run, a reload is in flight and spills are pending."""
    l3 = state["tiers"]["l3"]
    return bool(
        state["requests"]["running"] == 8
        and state["requests"]["held"]
        and state["in_flight"].get("reload")
        and l3["spill_pending_pages"]
    )


def flush_amid_work(server: FloorServer, right: Right, rules: Rules, held: Prompt, streams: list[Prompt]) -> None:
    """Two flushes at once; what runs, what is held and what is being written take no harm."""
    rules.set(*(Rule(name=name, path=SLAB, delay_s=600) for name in ("preadv", "pwritev")))
    with ThreadPoolExecutor(11) as pool:
        waiting = pool.submit(server.ask, held)
        server.wait_for(lambda state: bool(state["in_flight"].get("reload")))
        texts = [pool.submit(stream, server, prompt) for prompt in streams]
        before = server.wait_for(is_busy)
        first, second = pool.map(lambda _: flush(server), range(2))
        after = server.get("/cache")
        rules.set()
        assert [text.result() for text in texts] == [right(prompt, STREAM_TOKENS) for prompt in streams]
        assert waiting.result().text == right(held)
    assert "l3" not in first["dropped"]
    assert first["dropped"]["l1"] + second["dropped"]["l1"] >= 24  # what two earlier requests had left
    assert min(first["kept"]["l1"], second["kept"]["l1"]) > 0
    for tier, used in after["hit_tokens"].items():
        assert used >= before["hit_tokens"][tier]
    assert after["query_tokens"] >= before["query_tokens"]
    assert after["evicted_pages"] >= before["evicted_pages"]


def test_a_flush_drops_what_it_says_and_harms_nothing(
    start: Callable[..., FloorServer], right: Right, rules: Rules, known: list[Prompt], floor: Path
):
    streams = right.prompts(8, 150, seed=51, max_tokens=STREAM_TOKENS)
    server = start(*config_flags(floor, timeout_s=60), rules=rules)
    for prompt in known[:2]:
        assert server.ask(prompt).l3 == whole_pages(prompt)
    server.wait_settled()
    flush_amid_work(server, right, rules, known[2], streams)

    server.wait_settled()
    quiet = flush(server)
    assert quiet["kept"] == EMPTY_L1_L2  # nothing has leaked: all could go
    state = server.wait_settled()
    assert state["tiers"]["l1"]["cached_pages"] == state["tiers"]["l2"]["cached_frames"] == 0
    assert flush(server) == {"dropped_pages": 0, "kept_pages": 0, "dropped": EMPTY_L1_L2, "kept": EMPTY_L1_L2}
    for prompt in (known[0], streams[0]):  # on disk still, though one that hung may be thought too slow for a while
        answer = server.ask(prompt)
        assert (answer.text, answer.l1, answer.l2) == (right(prompt), 0, 0)

    server.wait_settled()
    used = server.disk()["slots_used"]
    assert used >= sum(whole_pages(prompt) for prompt in streams) // PAGE_TOKENS
    emptied = flush(server, "l3")
    assert emptied == {"dropped_pages": used, "kept_pages": 0, "dropped": {"l3": used}, "kept": {"l3": 0}}
    assert server.ask(known[0]).l1 == whole_pages(known[0])  # which was not asked for
    assert flush(server, "l1", "l2", "l3")["kept"]["l1"] == 0
    answer = server.ask(known[1])
    assert (answer.text, answer.cached) == (right(known[1]), 0)
    server.wait_settled()
    assert server.stop() == 0
    assert_whole(floor)


def test_a_flush_of_a_tier_that_is_none(right: Right):
    response = right.server.post("/cache/flush", {"tiers": ["l4"]})
    assert response.status_code == 400
    assert "l1, l2, l3" in response.text
