"""The schedulers' exchanges between real processes: everybody gets rank 0's bytes, and the least of each number."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from benthic.common.errors import PeerLost
from benthic.parallel.control import BUFFER_BYTES, Alone, GroupControl, gather_ints
from tests.support.gloo_ranks import GlooRanks, RankDied

pytestmark = pytest.mark.multirank

ROOM = BUFFER_BYTES - 8  # bytes of a frame that one broadcast carries


def frame_of(length: int) -> bytes:
    """Bytes of which none is like its neighbours; 0 is among them."""
    return hashlib.shake_128(length.to_bytes(8, "little")).digest(length)


def share_frames(lengths: Sequence[int]) -> list[tuple[int, str, int]]:
    """Of each frame: its length, its hash, and how many broadcasts it took."""
    control = GroupControl()
    got = []
    for length in lengths:
        before = control.collectives
        data = control.share(frame_of(length) if control.rank == 0 else None)
        got.append((len(data), hashlib.sha256(data).hexdigest(), control.collectives - before))
    return got


def test_a_frame_comes_whole_and_takes_a_second_broadcast_only_where_it_is_long(ranks: GlooRanks) -> None:
    # short ones behind long ones too: nothing of an earlier frame may show
    lengths = [5, 0, 1, ROOM - 1, ROOM, 3, ROOM + 1, ROOM, BUFFER_BYTES, 2 * BUFFER_BYTES + 17, 2, 3_000_000, 0]
    want = [(n, hashlib.sha256(frame_of(n)).hexdigest(), 2 if n > ROOM else 1) for n in lengths]
    assert ranks.run(share_frames, lengths) == [want] * ranks.size


def reduce_numbers(rounds: int) -> list[list[int]]:
    control = GroupControl()
    results = [list(control.min_reduce(numbers(control.rank, turn))) for turn in range(rounds)]
    assert control.collectives == rounds
    return results


def numbers(rank: int, turn: int) -> list[int]:
    """As many on each rank; signed, up to 2^62, the least on another rank each time."""
    return [((rank * 7 + i * 5 + turn) % 11 - 5) * (1 << (i * 4 % 60)) for i in range(turn * 9 % 50 + 1)]


def test_the_least_of_each_number_is_known_to_all(ranks: GlooRanks) -> None:
    want = [[min(column) for column in zip(*(numbers(rank, turn) for rank in range(ranks.size)), strict=True)]
            for turn in range(12)]  # fmt: skip
    assert ranks.run(reduce_numbers, 12) == [want] * ranks.size


def gather_from_all() -> tuple[tuple[int, ...], tuple[int, ...], int]:
    control = GroupControl()
    small = gather_ints(control, 10 * control.rank)
    return small, gather_ints(control, (1 << 62) - 1 - control.rank), control.collectives


def test_each_ranks_number_is_known_to_all_by_one_exchange(ranks: GlooRanks) -> None:
    small, large = tuple(10 * rank for rank in range(ranks.size)), tuple((1 << 62) - 1 - r for r in range(ranks.size))
    assert ranks.run(gather_from_all) == [(small, large, 2)] * ranks.size


def many_ticks(num_ticks: int) -> str:
    """Frames and minima by turns, as in a scheduler's life; the hash of all that this rank got."""
    control, seen = GroupControl(), hashlib.sha256()
    for tick in range(num_ticks):
        length = ROOM + tick if tick % 20 == 7 else tick
        seen.update(control.share(frame_of(length) if control.rank == 0 else None))
        if tick % 3:
            seen.update(repr(control.min_reduce(numbers(control.rank, tick))).encode())
    return seen.hexdigest()


def test_ticks_follow_one_another_without_a_mix_up(ranks: GlooRanks) -> None:
    assert len(set(ranks.run(many_ticks, 200))) == 1


def test_one_rank_alone_exchanges_nothing() -> None:
    alone = Alone()
    assert alone.share(b"frame") == b"frame"
    assert alone.min_reduce([3, 1]) == [3, 1]
    assert gather_ints(alone, 5) == (5,)
    assert alone.collectives == 0


# --- faults -----------------------------------------------------------------------------------------------------------


def without_rank_0(folder: Path, bound_s: float) -> None:
    """Rank 0 never sends its frame, then dies; the others write down what they raise, and end."""
    hung, dead = (GroupControl(dist.new_group(timeout=timedelta(seconds=s))) for s in (bound_s, 120.0))
    for control in (hung, dead):
        control.min_reduce([0])  # all are connected
    if dist.get_rank() == 0:
        time.sleep(2 * bound_s)
        os._exit(3)
    ends = []
    for control in (hung, dead):
        began = time.monotonic()
        try:
            control.share(None)
        except PeerLost as error:
            ends.append((str(error), time.monotonic() - began))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(ends))
    os._exit(0)


def test_a_rank_0_that_hangs_or_dies_is_an_error_within_the_bound(ranks: GlooRanks, tmp_path: Path) -> None:
    ranks.run_dying(set(range(ranks.size)), without_rank_0, tmp_path, 1.5)
    for rank in range(1, ranks.size):
        (hung, hung_s), (dead, dead_s) = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "broke off" in hung
        assert "broke off" in dead
        assert hung_s < 1.5 + 5
        assert dead_s < 20


# --- the processes themselves -----------------------------------------------------------------------------------------


def on_rank_1(what: str) -> int:
    if dist.get_rank() == 1:
        if what == "raise":
            raise ValueError("not on this rank")
        os._exit(9)
    dist.barrier()
    return 0


def ranks_sum() -> int:
    return sum(gather_ints(GroupControl(), dist.get_rank()))


def test_an_error_on_one_rank_reaches_the_test_and_the_next_one_has_new_ranks(ranks: GlooRanks) -> None:
    with pytest.raises(ValueError, match="not on this rank") as raised:
        ranks.run(on_rank_1, "raise")
    assert "on rank 1" in raised.value.__notes__[0]
    with pytest.raises((RankDied, RuntimeError), match=r"rank 1 has ended with 9|onnection"):
        ranks.run(on_rank_1, "die")
    assert ranks.run(ranks_sum) == [sum(range(ranks.size))] * ranks.size


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(100)


def test_a_rank_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    with GlooRanks(2, tmp_path, timeout_s=1.0) as ranks:
        assert ranks.run(ranks_sum) == [1, 1]
        with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 within 1.0 s"):
            ranks.run(hang_on_rank_0)
    assert time.monotonic() - began < 60
