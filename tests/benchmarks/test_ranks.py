"""The benchmarks over several ranks run, and say what must hold on any machine: counts, bytes and equal answers."""

import json
from typing import Any

import psutil
import pytest

from benchmarks import collectives, dsa
from benchmarks.rank_traffic import STEPS, StepTraffic, unexpected
from benchmarks.ranks import RankFailed, RankProcesses
from benthic.parallel.launch import Ranks

pytestmark = pytest.mark.multirank


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON line."""
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return told


def test_exchanges_bytes_and_capacity_are_what_they_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    collectives.main(["--small", "--json", "--ranks", "2", "--only", "control", "traffic", "capacity"])
    told = figures(capsys)
    counts = {name: told[f"collectives_{name}"] for name in ("idle", "tick", "tick_in_flight")}
    assert counts == {"idle": 0, "tick": 1, "tick_in_flight": 2}
    assert told["cp2_cached_tokens"] == 2 * told["cp1_cached_tokens"] > 0
    assert told["cp2_found_tokens"] == 2 * told["cp1_found_tokens"] > 0
    for model in ("llama-tiny", "dsa-tiny_ep"):
        for step in STEPS:
            key = f"{model}_cp2_{step}"
            assert told[f"{key}_bytes"] == told[f"{key}_expected_bytes"] > 0
    # 2 layers, 128 tokens, half of them a rank's: 2 heads of 16, keys and values, float32; as much again of context
    assert told["llama-tiny_cp2_prefill_gather_bytes"] == 2 * 64 * 2 * 2 * 16 * 4
    assert told["llama-tiny_cp2_prefill_context_gather_bytes"] == 2 * told["llama-tiny_cp2_prefill_gather_bytes"]
    # 3 pages of 16: one rank has two of them, the other is padded up to it
    assert told["llama-tiny_cp2_prefill_short_gather_bytes"] == 2 * 32 * 2 * 2 * 16 * 4
    # 2 layers, 2 rows, 4 heads, 16 numbers and a log-sum-exp
    assert told["llama-tiny_cp2_decode_gather_bytes"] == 2 * 2 * 4 * 17 * 4


def test_times_of_one_rank_stand_beside_those_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    collectives.main(["--small", "--json", "--ranks", "2", "--only", "planner", "tick", "speed", "--repeats", "2"])
    told = figures(capsys)
    for ranks in (1, 2):
        assert told[f"cp{ranks}_tick_8_ms"] > 0
        assert told[f"llama-tiny_cp{ranks}_prefill_per_s"] > 0
        assert told[f"llama-tiny_cp{ranks}_decode_per_s"] > 0
        assert told[f"planner_{ranks}_owners_s"] > 0


def test_a_dsa_model_on_two_ranks_beside_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--small --json --cp 2 --ep --only prefill decode --prefill 128 --batches 2 --repeats 1"
    dsa.main(words.split())
    told = figures(capsys)
    for name in ("prefill_128_per_s", "decode_b2_per_s"):
        ratio = told[f"cp2_{name}_ratio"]
        assert ratio == pytest.approx(told[f"cp2_{name}"] / told[f"cp1_{name}"])
        assert ratio > 0


def test_bytes_or_calls_that_differ_are_named() -> None:
    right = {"all_gather": (2, 100)}
    steps = {
        "prefill": StepTraffic(right, right, 2),
        "prefill_context": StepTraffic({"all_gather": (2, 101)}, right, 2),
        "prefill_short": StepTraffic(right, right, 2),
        "decode": StepTraffic({"all_gather": (3, 100)}, right, 2),
    }
    assert unexpected(steps) == ["prefill_context", "decode"]


def fail_on(ranks: Ranks, rank: int) -> int:
    if ranks.layout.rank == rank:
        raise ValueError("no such thing")
    ranks.barrier()  # of the others: nobody ends it
    return ranks.layout.rank


def test_a_rank_that_fails_ends_all_and_is_named() -> None:
    with RankProcesses(2, "cpu") as processes:
        assert processes.run(fail_on, 5) == [0, 1]
        started = [process.pid for process in processes._processes]
        with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2.*no such thing"):
            processes.run(fail_on, 1)
    assert not any(psutil.pid_exists(pid) for pid in started if pid is not None)
