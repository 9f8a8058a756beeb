"""What the benchmarks of the tiers say about reading and computing, and the raw disk beside it."""

from pathlib import Path

import pytest

from benchmarks import dsa_parts
from benchmarks.dsa_parts import RAW_DEPTHS, raw_rates
from benchmarks.tiers_engine import FirstTokens


def test_each_round_says_whether_the_prefix_was_read_or_computed() -> None:
    seen = FirstTokens(1000, {"cold": [1.0, 1.0, 1.0], "l3": [1.5, 1.0, 0.25]}, [128, 0, 960])
    assert seen.choice() == {
        "l3_read_s": [0.25],
        "l3_computed_s": [1.5, 1.0],
        "l3_read_tokens": [128, 0, 960],
        "l3_over_cold": [1.5, 1.0, 0.25],
    }
    assert seen.describe_choice() == (
        "1500 ms, 1.50 of cold, computed after a sample of 128 tokens; 1000 ms, 1.00 of cold, computed; "
        "250 ms, 0.25 of cold, read"
    )


def test_raw_reads_of_each_depth_have_slots_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot_bytes = 8192
    (tmp_path / "slab-0.dat").write_bytes(bytes(43 * slot_bytes))
    read: list[tuple[int, range]] = []

    class Noted:
        def __init__(self, path: Path, *_: object) -> None:
            assert path == tmp_path / "slab-0.dat"

        def read(self, num_slots: int, depth: int, first: int) -> float:
            read.append((depth, range(first, first + num_slots)))
            return float(depth)

        def close(self) -> None:
            pass

    monkeypatch.setattr(dsa_parts, "RawDisk", Noted)
    assert raw_rates(tmp_path, slot_bytes, 41) == {depth: depth for depth in RAW_DEPTHS}
    assert [(depth, len(slots)) for depth, slots in read] == [(depth, 10) for depth in RAW_DEPTHS]
    assert len({slot for _, slots in read for slot in slots}) == 40
