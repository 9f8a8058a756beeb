"""Messages survive the trip between processes, and damaged frames are refused."""

import msgspec
import pytest

from benthic.messages import (
    Abort,
    Beat,
    CacheState,
    DiskStats,
    Failed,
    Finished,
    FlushCache,
    FlushDone,
    LaneState,
    Outputs,
    Prefilled,
    RankStats,
    SamplingParams,
    Shutdown,
    Stats,
    Submit,
    TierCounters,
    decode_from_engine,
    decode_to_engine,
    encode,
)


@pytest.mark.parametrize(
    "message",
    [
        Submit(
            id=3,
            prompt=b"\1\0\0\0",
            root=b"r" * 32,
            hashes=b"",
            params=SamplingParams(max_tokens=4, logit_bias={5: -1.0}),
        ),
        Abort((1, 2)),
        FlushCache(9),
        FlushCache(10, ("l1", "l3")),
        Shutdown(),
        Shutdown(finish_by_s=7.5),
    ],
)
def test_to_engine(message) -> None:
    assert decode_to_engine(encode(message)) == message


def test_from_engine() -> None:
    message = Outputs(
        ids=b"x" * 8,
        tokens=b"y" * 4,
        prefilled=(Prefilled(1, 64, 0.5), Prefilled(2, 0, 0.0, cached_l2=128, cached_l3=64)),
        finished=(Finished(1, "stop"),),
    )
    assert decode_from_engine(encode(message)) == message


def test_the_tiers_travel_with_state_and_stats() -> None:
    lane = LaneState(lane=0, total=10, free=4, cached=5, private=1, locked=2)
    counters = TierCounters(backup_pages=3, spill_suspended=True, in_flight={"durable": 2})
    disk = a_disk(read_failures={"checksum": 1}, out_of_service="too many errors")
    state = CacheState(
        token=1, tick=2, page_size=64, nodes=3, lanes=(lane,), running=0, waiting=0, hits_tokens_l1=0, query_tokens=0,
        evicted_pages=0, preemptions=0, digest="00", held=4, l2_lanes=(lane,), policy="write_back", tiers=counters,
        disks=(disk,),
    )  # fmt: skip
    stats = Stats(
        tick=2, running=0, waiting=0, prompt_tokens=9, cached_tokens_l1=1, generated_tokens=0, preemptions=0,
        evicted_pages=0, lanes=(lane,), busy_s=0.5, host_s=0.25, ticks=2, slow_ticks=0, held=4, cached_tokens_l2=3,
        cached_tokens_l3=5, l2_lanes=(lane,), tiers=counters, disks=(disk,), tick_tiers_s=0.125,
    )  # fmt: skip
    done = FlushDone(7, {"l1": 2, "l3": 1}, {"l1": 0, "l3": 4}, "rank 1: a read hangs")
    for message in (state, stats, done):
        assert decode_from_engine(encode(message)) == message


def test_what_ranks_say() -> None:
    stats = RankStats(3, (a_disk(rank=3, slots_used=7), a_disk(rank=3)))
    for message in (stats, Beat(5, 0.25, 2), Failed("gone", rank=1, follows=True)):
        assert decode_from_engine(encode(message)) == message
    assert (Beat(5, 0.25).rank, Failed("x").rank, Failed("x").follows) == (0, 0, False)


def test_without_tiers_nothing_is_said_of_them() -> None:
    done = FlushDone(7, {"l1": 2}, {"l1": 0})
    assert decode_from_engine(encode(done)) == done
    assert Prefilled(1, 64, 0.5) == Prefilled(1, 64, 0.5, 0, 0)
    assert TierCounters().in_flight == {}


def a_disk(**fields: object) -> DiskStats:
    zeros: dict[str, object] = dict.fromkeys(DiskStats.__struct_fields__, 0)
    zeros |= {"path": "/kv/slab-0.dat", "direct": True, "read_failures": {}, "out_of_service": "", "last_error": ""}
    return DiskStats(**(zeros | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x81\xa4type\xa5Nope!", encode(Abort((1,)))[:-1]])
def test_damaged_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(frame)
