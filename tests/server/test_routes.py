"""The endpoints that generate nothing."""

import os
import signal
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_server_process import running, wait_for


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_health_and_ready(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json()["status"] == "ready"


def test_tokenize_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "é!"}).json()
    assert answer == {"tokens": [0xC3, 0xA9, 33], "count": 3, "max_model_len": 2048}
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "é!"}
    messages = [{"role": "user", "content": "x"}]
    assert http.post("/tokenize", json={"messages": messages}).json()["count"] == len("[user]x")


def test_tokenize_refuses_what_is_wrong(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [258]}).json()["error"]["param"] == "tokens"
    assert http.post("/detokenize", json={}).json()["error"]["param"] == "tokens"


def test_cache_state(http: httpx.Client) -> None:
    state = http.get("/cache").json()
    tier = state["tiers"]["l1"]
    assert tier["total_pages"] == tier["free_pages"] + tier["cached_pages"] + tier["private_pages"] == 1000
    assert state["requests"] == {"running": 0, "waiting": 0, "held": 0}
    assert state["tiers"]["l2"]["policy"] is None
    assert state["tiers"]["l2"]["total_frames"] == state["tiers"]["l3"]["total_slots"] == 0
    assert state["tiers"]["l3"]["disks"] == []


def test_while_the_engine_hangs_health_answers_and_the_cache_state_is_the_last_known(tmp_path: Path) -> None:
    with running(tmp_path) as own, own.http() as http:
        own.wait_ready()
        assert http.get("/cache").json()["age_s"] < 1
        (engine,) = own.engine_pids()
        os.kill(engine, signal.SIGSTOP)
        late = http.get("/cache").json()
        assert late["age_s"] >= 2
        assert late["tiers"]["l1"]["total_pages"] == 1000
        assert http.get("/health").json() == {"status": "ok"}
        os.kill(engine, signal.SIGCONT)
        wait_for(lambda: http.get("/cache").json()["age_s"] < 1)
        assert own.end() == 0


def samples(http: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {s.name + str(sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_metrics_are_what_clients_were_told(http: httpx.Client) -> None:
    before = samples(http)
    body = {"prompt": "m" * 50, "max_tokens": 9, "n": 2, "temperature": 0, "stop": "mmmm", "cache_salt": "metrics"}
    usages = [http.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    after = samples(http)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("benthic_prompt_tokens_total[]") == sum(u["prompt_tokens"] for u in usages) == 100
    assert grown("benthic_generated_tokens_total[]") == sum(u["completion_tokens"] for u in usages) == 16
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert grown("benthic_cached_tokens_total[('tier', 'l1')]") == cached == 48
    assert grown("benthic_requests_total[('finish_reason', 'stop')]") == 4
    assert grown("benthic_time_to_first_token_seconds_count[]") == 4
    wait_for(lambda: "benthic_requests_running[]" in samples(http))
