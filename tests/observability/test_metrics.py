"""Series of the engine's totals and of the server's own counts."""

from benthic.messages import LaneState, Stats
from benthic.observability.metrics import Metrics


def stats(num_lanes: int = 2) -> Stats:
    lanes = tuple(LaneState(lane=i, total=10, free=4, cached=5, private=1, locked=2) for i in range(num_lanes))
    return Stats(
        tick=7,
        running=3,
        waiting=1,
        prompt_tokens=100,
        cached_tokens_l1=16,
        generated_tokens=50,
        preemptions=2,
        evicted_pages=9,
        lanes=lanes,
        busy_s=1.5,
        host_s=0.5,
        ticks=40,
        slow_ticks=1,
    )


def test_group_gauges_once_and_lane_gauges_once_a_rank() -> None:
    metrics = Metrics()
    metrics.update(stats())
    registry = metrics.registry
    text = metrics.render().decode()
    assert text.count("\nbenthic_requests_running ") == 1
    assert registry.get_sample_value("benthic_requests_running") == 3
    assert registry.get_sample_value("benthic_evicted_pages_total") == 9
    labels = {"cp_rank": "1", "cp_size": "2", "tp_rank": "0"}
    assert registry.get_sample_value("benthic_l1_used_pages", labels) == 6
    assert registry.get_sample_value("benthic_l1_pages", labels | {"state": "cached"}) == 5


def test_counts_by_tier_and_reason() -> None:
    metrics = Metrics()
    metrics.count_prompt(100, cached_l1=64, cached_l3=16)
    metrics.count_generated(5)
    metrics.count_finish("stop")
    metrics.count_refused(429)
    metrics.observe_gap(0.4, 4)
    value = metrics.registry.get_sample_value
    assert value("benthic_prompt_tokens_total") == 100
    cached = [value("benthic_cached_tokens_total", {"tier": tier}) for tier in ("l1", "l2", "l3")]
    assert cached == [64, 0, 16]
    assert value("benthic_generated_tokens_total") == 5
    assert value("benthic_requests_total", {"finish_reason": "stop"}) == 1
    assert value("benthic_refused_requests_total", {"status": "429"}) == 1
    assert value("benthic_inter_token_latency_seconds_count") == 4


def test_two_servers_share_nothing() -> None:
    one, two = Metrics(), Metrics()
    one.count_generated(3)
    assert two.registry.get_sample_value("benthic_generated_tokens_total") == 0
    assert b"benthic_requests_running" not in two.render()
