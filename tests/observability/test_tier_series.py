"""Series of the tiers: once a rank where a rank owns them, once for the group where the core counts them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from benthic.messages import DiskStats, LaneState, RankStats, Stats, TierCounters
from benthic.observability.metrics import Metrics
from benthic.observability.rank_disks import RankDisks
from benthic.observability.tier_series import imbalance
from tests.observability.test_metrics import stats


def disk(rank: int, **fields: object) -> DiskStats:
    zeros: dict[str, object] = dict.fromkeys(DiskStats.__struct_fields__, 0)
    zeros |= {"rank": rank, "path": f"/kv/slab-{rank}.dat", "direct": True, "read_failures": {}}
    return DiskStats(**(zeros | {"out_of_service": "", "last_error": ""} | fields))  # type: ignore[arg-type]


def tiered() -> Stats:
    frames = tuple(LaneState(lane=i, total=20, free=8, cached=9, private=3, locked=1) for i in range(2))
    counters = TierCounters(
        backup_pages=40, spill_nodes_lost=2, quarantined_frames=5, in_flight={"reload": 1, "durable": 3}
    )
    disks = (disk(0, slots_used=7, write_errors=3, out_of_service="64 writes failed"), disk(1, read_failures={"io": 2}))
    return msgspec.structs.replace(
        stats(), held=4, l2_lanes=frames, tiers=counters, disks=disks, tick_tiers_s=0.25
    )  # fmt: skip


def registry_of(value: Stats) -> CollectorRegistry:
    metrics = Metrics()
    metrics.update(value)
    return metrics.registry


def test_tier_series_stand_once_a_rank() -> None:
    value = registry_of(tiered()).get_sample_value
    for rank in ("0", "1"):
        labels = {"cp_rank": rank, "cp_size": "2", "tp_rank": "0"}
        assert value("benthic_l2_capacity_frames", labels) == 20
        assert value("benthic_l2_used_frames", labels) == 12
        assert value("benthic_l2_locked_frames", labels) == 1
        assert value("benthic_l2_frames", labels | {"state": "private"}) == 3
    first, second = ({"cp_rank": rank, "cp_size": "2", "tp_rank": "0"} for rank in "01")
    assert value("benthic_l3_used_slots", first) == 7
    assert [value("benthic_l3_out_of_service", labels) for labels in (first, second)] == [1, 0]
    assert [value("benthic_l3_write_errors_total", labels) for labels in (first, second)] == [3, 0]
    assert value("benthic_l3_read_failures_total", second | {"kind": "io"}) == 2


def test_what_the_core_counts_stands_once() -> None:
    value = registry_of(tiered()).get_sample_value
    assert value("benthic_requests_held") == 4
    assert value("benthic_l2_backup_pages_total") == 40
    assert value("benthic_l3_spill_lost_nodes_total") == 2
    assert value("benthic_l2_quarantined_frames") == 5
    assert value("benthic_tick_tiers_seconds_total") == 0.25
    assert value("benthic_in_flight_operations", {"stream": "durable"}) == 3


def test_every_counter_of_the_structs_is_shown() -> None:
    """A field that nobody exports is forgotten at once: each gets a number of its own, and all numbers must appear."""
    numbers = iter(range(100_001, 100_100))
    counted = {f.name: next(numbers) for f in msgspec.structs.fields(TierCounters) if f.type is int}
    seen = {f.name: next(numbers) for f in msgspec.structs.fields(DiskStats) if f.type is int}
    hidden = {"rank", "us_per_page_read"}  # a label, and an input of a decision
    metrics = Metrics()
    metrics.update(msgspec.structs.replace(stats(), tiers=TierCounters(**counted), disks=(disk(**seen),)))
    families = text_string_to_metric_families(metrics.render().decode())
    shown = {sample.value for family in families for sample in family.samples}
    assert {name for name, number in (counted | seen).items() if number not in shown} == hidden


def test_without_tiers_the_group_series_are_there() -> None:
    registry = registry_of(stats())
    assert registry.get_sample_value("benthic_l3_reloads_total") == 0
    assert registry.get_sample_value("benthic_requests_held") == 0
    labels = {"cp_rank": "0", "cp_size": "2", "tp_rank": "0"}
    assert registry.get_sample_value("benthic_l3_used_slots", labels) is None


def test_each_ranks_newest_disks_stand_beside_the_firsts() -> None:
    disks = RankDisks()
    metrics = Metrics(disks)
    metrics.update(msgspec.structs.replace(stats(num_lanes=4), disks=(disk(0, slots_used=5),)))
    for used in (1, 2):
        for rank in (3, 1):
            disks.update(RankStats(rank, (disk(rank, slots_used=10 * rank + used),)))
    value = metrics.registry.get_sample_value
    labels = [{"cp_rank": str(rank), "cp_size": "4", "tp_rank": "0"} for rank in range(4)]
    assert [value("benthic_l3_used_slots", one) for one in labels] == [5, 12, None, 32]
    text = metrics.render().decode()
    assert text.count("\nbenthic_l3_used_slots{") == 3
    assert text.count("\nbenthic_l1_used_pages{") == 4
    assert text.count("\nbenthic_requests_running ") == text.count("\nbenthic_l2_backup_pages_total ") == 1


def test_ranks_that_share_heads_have_one_lane_and_a_disk_each() -> None:
    disks = RankDisks()
    metrics = Metrics(disks)
    metrics.update(msgspec.structs.replace(stats(num_lanes=1), disks=(disk(0, slots_used=5),)))
    disks.update(RankStats(1, (disk(1, slots_used=6),)))
    value = metrics.registry.get_sample_value
    labels = [{"cp_rank": "0", "cp_size": "1", "tp_rank": str(rank)} for rank in range(2)]
    assert [value("benthic_l3_used_slots", one) for one in labels] == [5, 6]
    assert [value("benthic_l1_used_pages", one) for one in labels] == [6, None]


def lanes_of(*used: int) -> list[LaneState]:
    return [LaneState(lane=i, total=100, free=100 - n, cached=n, private=0, locked=0) for i, n in enumerate(used)]


@pytest.mark.parametrize(
    ("used", "expected"), [((), 0), ((7,), 0), ((0, 0), 0), ((5, 5, 5), 0), ((6, 2), 0.5), ((8, 0, 0, 0), 3)]
)
def test_imbalance_is_the_fullest_lane_over_the_mean_less_one(used: tuple[int, ...], expected: float) -> None:
    assert imbalance(lanes_of(*used)) == pytest.approx(expected)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=16))
def test_imbalance_is_between_even_and_all_in_one(used: list[int]) -> None:
    assert -1e-9 <= imbalance(lanes_of(*used)) <= len(used) - 1 + 1e-9
