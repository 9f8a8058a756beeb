"""Engines of several processes: a rank that dies, hangs or refuses ends the whole server, and is named."""

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests.server.test_lifecycle import SLOW, Stream, assert_ended_with_error, assert_nothing_left
from tests.server.test_routes import samples
from tests.server.test_stop_with_spills import wait_for_pending
from tests.support.fake_server_process import FakeServer, alive, running, wait_for

TWO, FOUR = ["--cp", "2"], ["--cp", "4"]


def codes(server: FakeServer) -> set[int]:
    """What /health and /ready answer until the port is closed."""
    seen: set[int] = set()
    with server.http() as http:
        try:
            while True:
                seen |= {http.get(path).status_code for path in ("/health", "/ready")}
        except httpx.HTTPError:
            return seen


def test_ranks_serve_and_end_in_order(tmp_path: Path) -> None:
    with running(tmp_path, FOUR) as server, server.http() as http:
        server.wait_ready()
        pids = server.engine_pids()
        assert [server.rank_pid(rank) in pids for rank in range(4)] == [True] * 4
        assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3}).status_code == 200
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        assert all(b"GLOO_SOCKET_IFNAME=lo" in environment for environment in environments)
        assert server.end() == 0
        assert_nothing_left(server, pids)
    assert "did not end in order" not in server.text


def test_a_users_interface_stays(tmp_path: Path) -> None:
    with running(tmp_path, TWO, environ={"GLOO_SOCKET_IFNAME": "eth7"}) as server:
        server.wait_ready()
        environment = Path(f"/proc/{server.rank_pid(1)}/environ").read_bytes().split(b"\0")
        assert b"GLOO_SOCKET_IFNAME=eth7" in environment
        assert server.end() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_streams_with_an_error_and_the_server_with_its_name(tmp_path: Path, rank: int) -> None:
    with running(tmp_path, TWO, SLOW) as server:
        server.wait_ready()
        stream, pids = Stream(server), server.engine_pids()
        wait_for(lambda: len(stream.events) > 80)  # so that a beat has told of a tick
        os.kill(server.rank_pid(rank), signal.SIGKILL)
        assert 503 in codes(server)
        assert_ended_with_error(stream.end(), f"rank {rank}'s process ended unexpectedly (killed by SIGKILL)")
        assert server.wait() == 1
        assert_nothing_left(server, pids)
    assert f"benthic: rank {rank}'s process ended unexpectedly (killed by SIGKILL), last in tick " in server.text
    assert "Traceback" not in server.text


def test_a_stopped_rank_is_missed_within_the_bound(tmp_path: Path) -> None:
    with running(tmp_path, ["--beat-s", "1", *FOUR], SLOW) as server:
        server.wait_ready()
        stream, pids = Stream(server), server.engine_pids()
        os.kill(server.rank_pid(2), signal.SIGSTOP)
        assert_ended_with_error(stream.end(), "rank 2 has given no sign of life for 1 s (bound 1 s), last in tick ")
        assert server.wait() == 1
        assert_nothing_left(server, pids)
    assert "benthic: rank 2 has given no sign of life" in server.text


@pytest.mark.parametrize("late_s", ["0", "1"])
def test_the_word_of_a_rank_that_cannot_start_reaches_the_terminal(tmp_path: Path, late_s: str) -> None:
    """Late: the others have long said that they lost it."""
    engine = ["--at-rank", "1", "--refuse", "shard 3 can't be read", "--refuse-late-s", late_s]
    with running(tmp_path, FOUR, engine) as server:
        assert server.wait() == 1
        assert server.leftovers() == []
    assert "benthic: rank 1: shard 3 can't be read" in server.text
    assert "has lost the others" not in server.text


def test_where_all_ranks_only_follow_the_first_word_is_told(tmp_path: Path) -> None:
    with running(tmp_path, ["--follow-s", "60", *TWO], [*SLOW, "--part-after", "5"]) as server:
        server.wait_ready()
        stream = Stream(server)
        assert_ended_with_error(stream.end(), "rank 0 has lost the others")  # without the wait
        assert server.wait() == 1
    assert "benthic: rank 0 has lost the others: connection closed" in server.text


def test_a_rank_that_dies_while_the_server_drains_is_named(tmp_path: Path) -> None:
    with running(tmp_path, ["--grace-s", "20", *TWO], SLOW) as server, server.http() as http:
        server.wait_ready()
        stream, pids = Stream(server), server.engine_pids()
        rank = server.rank_pid(1)
        server.child.send_signal(signal.SIGTERM)
        wait_for(lambda: http.get("/ready").status_code == 503)
        os.kill(rank, signal.SIGKILL)
        assert_ended_with_error(stream.end(), "rank 1's process ended unexpectedly (killed by SIGKILL)")
        assert server.wait() == 1
        assert_nothing_left(server, pids)


def test_a_rank_that_halts_while_the_server_drains_is_named(tmp_path: Path) -> None:
    with running(tmp_path, ["--beat-s", "1", "--grace-s", "60", *TWO], SLOW) as server, server.http() as http:
        server.wait_ready()
        stream, pids = Stream(server), server.engine_pids()
        rank = server.rank_pid(1)
        server.child.send_signal(signal.SIGTERM)
        wait_for(lambda: http.get("/ready").status_code == 503)
        os.kill(rank, signal.SIGSTOP)
        assert_ended_with_error(stream.end(), "rank 1 has given no sign of life")
        assert server.wait() == 1
        assert_nothing_left(server, pids)


def test_a_rank_that_dies_while_pages_are_written_is_no_clean_end(tmp_path: Path) -> None:
    engine = ["--disk", "--pending-pages", "1000", "--page-write-s", "0.05"]
    with running(tmp_path, TWO, engine) as server:
        server.wait_ready()
        wait_for_pending(server)
        rank = server.rank_pid(1)
        server.child.send_signal(signal.SIGTERM)
        with server.http() as http:
            wait_for(lambda: http.get("/ready").status_code == 503)
        os.kill(rank, signal.SIGKILL)
        assert server.wait() == 1
        assert server.leftovers() == []
    assert "ended before it had closed the cache: rank 1's process ended unexpectedly (killed by SIG" in server.text


def test_a_second_signal_ends_all_ranks_at_once_stopped_ones_too(tmp_path: Path) -> None:
    with running(tmp_path, ["--grace-s", "60", *FOUR], SLOW) as server, server.http() as http:
        server.wait_ready()
        pids = server.engine_pids()
        Stream(server)
        os.kill(server.rank_pid(3), signal.SIGSTOP)
        server.child.send_signal(signal.SIGINT)
        wait_for(lambda: http.get("/ready").status_code == 503)
        assert server.end(signal.SIGINT) == 128 + signal.SIGINT
        wait_for(lambda: not any(alive(pid) for pid in pids))
        assert server.leftovers() == []


def test_a_killed_server_takes_all_ranks_along(tmp_path: Path) -> None:
    with running(tmp_path, FOUR) as server:
        server.wait_ready()
        pids = server.engine_pids()
        server.child.kill()
        wait_for(lambda: not any(alive(pid) for pid in pids))
        assert len(pids) == 4


def test_a_signal_while_ranks_load(tmp_path: Path) -> None:
    with running(tmp_path, TWO, ["--load-s", "60"]) as server:
        wait_for(lambda: len(server.engine_pids()) == 2)
        pids = server.engine_pids()
        assert server.end() == 0
        assert_nothing_left(server, pids)


def test_metrics_count_once_whatever_the_ranks(tmp_path: Path) -> None:
    with running(tmp_path, FOUR, [*SLOW, "--disk"]) as server, server.http() as http:
        server.wait_ready()
        body = {"prompt": "m" * 40, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        usages: list[dict[str, int]] = []
        clients = [
            threading.Thread(
                target=lambda i=i: usages.append(
                    httpx.post(f"{server.url}/v1/completions", json=body | {"cache_salt": str(i)}, timeout=60).json()[
                        "usage"
                    ]
                )
            )
            for i in range(3)
        ]
        for client in clients:
            client.start()

        def total(name: str) -> float:
            return sum(value for key, value in samples(http).items() if key.startswith(name + "["))

        wait_for(lambda: total("benthic_requests_running") == 3)
        for client in clients:
            client.join()
        assert total("benthic_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages) == 120
        assert total("benthic_generated_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == 300
        ranks = [f"[('cp_rank', '{rank}'), ('cp_size', '4'), ('tp_rank', '0')]" for rank in range(4)]
        wait_for(lambda: sum("benthic_l3_used_slots" in key for key in samples(http)) == 4)
        wait_for(lambda: total("benthic_l1_used_pages") == 6)
        found = samples(http)
        assert [found[f"benthic_l1_used_pages{rank}"] for rank in ranks] == [2, 2, 1, 1]
        assert found["benthic_l1_lane_imbalance[]"] == pytest.approx(2 / 1.5 - 1)
        assert [found[f"benthic_l3_used_slots{rank}"] for rank in ranks] == [6, 1, 2, 3]
        disks = http.get("/cache").json()["tiers"]["l3"]["disks"]
        assert [disk["path"] for disk in disks] == [f"/kv/slab-{rank}.dat" for rank in range(4)]
        assert server.end() == 0
