"""What a server with a disk floor tells its clients: usage, state, flush and metrics by tier."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.test_routes import samples
from tests.support.fake_server_process import running

HINT = "64 writes failed; mend the disk and restart"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    engine = ["--disk", "--out-of-service", HINT, "--flush-message", "rank 0: a read hangs"]
    with running(tmp_path_factory.mktemp("tiers"), engine=engine) as server:
        server.wait_ready()
        with server.http() as client:
            yield client


def usage(http: httpx.Client, salt: str) -> dict[str, Any]:
    body = {"prompt": "t" * 50, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    return dict(http.post("/v1/completions", json=body).json()["usage"])


def test_usage_counts_each_cached_token_in_its_tier(http: httpx.Client) -> None:
    assert usage(http, "u")["cached_tokens_by_tier"] == {"l1": 0, "l2": 0, "l3": 0}
    assert usage(http, "u")["cached_tokens_by_tier"] == {"l1": 48, "l2": 0, "l3": 0}
    http.post("/cache/flush")
    before = samples(http)
    found = usage(http, "u")
    assert found["prompt_tokens_details"]["cached_tokens"] == 48
    assert found["cached_tokens_by_tier"] == {"l1": 0, "l2": 0, "l3": 48}
    name = "benthic_cached_tokens_total[('tier', 'l3')]"
    assert samples(http)[name] - before[name] == 48
    assert http.get("/cache").json()["hit_tokens"]["l3"] >= 48


def test_flush_takes_the_named_tiers_and_answers_by_tier(http: httpx.Client) -> None:
    usage(http, "f")
    first = http.post("/cache/flush", json={"tiers": None}).json()
    assert set(first["dropped"]) == set(first["kept"]) == {"l1", "l2"}
    assert first["dropped_pages"] == sum(first["dropped"].values()) >= 3
    assert "message" not in first
    assert usage(http, "f")["cached_tokens_by_tier"]["l3"] == 48
    last = http.post("/cache/flush", json={"tiers": ["l3", "l1", "l3"]}).json()
    assert last["dropped"].keys() == {"l1", "l3"}
    assert last["message"] == "rank 0: a read hangs"
    assert usage(http, "f")["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"tiers": ["l4"]}', "'l4' is no tier"),
        (b'{"tiers": []}', "is empty"),
        (b'{"tiers": "l1"}', "array"),
        (b'{"tiers": [1]}', "str"),
    ],
)
def test_a_wrong_flush_names_the_field(http: httpx.Client, body: bytes, words: str) -> None:
    answer = http.post("/cache/flush", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"].startswith("tiers")
    assert words in error["message"]


def test_a_flush_refuses_what_it_does_not_know(http: httpx.Client) -> None:
    assert http.post("/cache/flush", json={"tier": ["l1"]}).json()["error"]["param"] == "tier"
    assert http.post("/cache/flush", content=b"{").status_code == 400


def test_two_flushes_at_once_are_both_answered(http: httpx.Client) -> None:
    usage(http, "two")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = [job.result() for job in [pool.submit(http.post, "/cache/flush") for _ in range(2)]]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all(answer.json().keys() >= {"dropped", "kept"} for answer in answers)


def test_cache_shows_every_tier(http: httpx.Client) -> None:
    state = http.get("/cache").json()
    l2, l3 = state["tiers"]["l2"], state["tiers"]["l3"]
    assert l2["policy"] == "write_through"
    assert l2["total_frames"] == l2["free_frames"] + l2["cached_frames"] + l2["private_frames"] == 500
    assert state["requests"]["held"] == 2
    assert state["in_flight"] == {"durable": 1}
    (disk,) = l3["disks"]
    assert disk["total_bytes"] == 2000 * 8192
    assert disk["out_of_service"] == HINT
    assert (disk["write_errors"], disk["read_failures"]) == (2, {"checksum": 3})
    assert l3["spill_suspended"] is False


def test_metrics_show_every_tier(http: httpx.Client) -> None:
    found = samples(http)
    rank = "('cp_rank', '0'), ('cp_size', '1')"
    assert found[f"benthic_l2_used_frames[{rank}, ('tp_rank', '0')]"] == 20
    assert found[f"benthic_l3_out_of_service[{rank}, ('tp_rank', '0')]"] == 1
    assert found[f"benthic_l3_read_failures_total[{rank}, ('kind', 'checksum'), ('tp_rank', '0')]"] == 3
    assert found["benthic_in_flight_operations[('stream', 'durable')]"] == 1
    assert found["benthic_requests_held[]"] == 2
