"""The forward's exchanges between real processes: rows come where they belong, whatever each rank has of them."""

import json
import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from benthic.common.errors import PeerLost
from benthic.parallel.collectives import GroupCollectives, forward_group, padded_gather, padded_scatter
from benthic.parallel.cp_split import split_step
from tests.support.gloo_ranks import GlooRanks

pytestmark = pytest.mark.multirank

# rows of each rank (of the last two, where there are two): uneven, some without, all without, even
COUNTS: list[tuple[int, ...]] = [(3, 1, 4, 2), (0, 5, 0, 1), (0, 0, 0, 7), (0, 2, 0, 0), (2, 2, 2, 2), (1, 0, 0, 0)]
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def rows_of(rank: int, count: int, dtype: torch.dtype, width: tuple[int, ...] = (3,)) -> torch.Tensor:
    """Small whole numbers, none of them 0, exact in every dtype here; no two ranks' rows are alike."""
    values = torch.arange(count * int(np.prod(width))) % 13 + 1 + 40 * rank
    return values.reshape(count, *width).to(dtype)


@cache
def group() -> GroupCollectives:
    return forward_group("gloo", 60.0)


# --- padded exchanges -------------------------------------------------------------------------------------------------


def gather_all(counts: Sequence[int], dtype: torch.dtype, width: tuple[int, ...], most: int) -> torch.Tensor:
    exchange = group()
    return padded_gather(exchange, rows_of(exchange.rank, counts[exchange.rank], dtype, width), most)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_padded_gather_brings_every_rank_all_rows(ranks: GlooRanks, dtype: torch.dtype) -> None:
    for counts in COUNTS:
        counts = counts[-ranks.size :]
        for most, width in ((max(counts), (3,)), (max(counts) + 2, (2, 5)), (max(counts), ())):
            want = [torch.cat([rows_of(r, n, dtype, width), torch.zeros(most - n, *width, dtype=dtype)])
                    for r, n in enumerate(counts)]  # fmt: skip
            for got in ranks.run(gather_all, counts, dtype, width, most):
                assert got.dtype == dtype
                assert torch.equal(got, torch.cat(want)), f"{counts}, padded to {most}"


def scatter_all(counts: Sequence[int], dtype: torch.dtype, most: int) -> torch.Tensor:
    """Each rank gives its partial sums of all rows, and rubbish in the padding."""
    exchange = group()
    given = torch.full((exchange.size * most, 3), 77, dtype=dtype)
    for rank, count in enumerate(counts):
        given[rank * most : rank * most + count] = rows_of(rank, count, dtype) * (exchange.rank + 1)
    return padded_scatter(exchange, given, counts[exchange.rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_padded_scatter_brings_every_rank_the_sums_of_its_own_rows(ranks: GlooRanks, dtype: torch.dtype) -> None:
    parts = sum(range(1, ranks.size + 1))
    for counts in COUNTS:
        counts = counts[-ranks.size :]
        for most in (max(counts), max(counts) + 1):
            for rank, got in enumerate(ranks.run(scatter_all, counts, dtype, most)):
                want = rows_of(rank, counts[rank], torch.float32) * parts
                assert got.shape == want.shape
                torch.testing.assert_close(got.float(), want, rtol=0.02 if dtype == torch.bfloat16 else 0, atol=0)


def there_and_back(counts: Sequence[int]) -> bool:
    exchange = group()
    own = rows_of(exchange.rank, counts[exchange.rank], torch.float32)
    back = padded_scatter(exchange, padded_gather(exchange, own, max(counts)), len(own))
    return torch.equal(back, own * exchange.size)


def test_a_scatter_undoes_a_gather(ranks: GlooRanks) -> None:
    for counts in COUNTS:
        assert all(ranks.run(there_and_back, counts[-ranks.size :]))


def of_nothing() -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    exchange, nothing = group(), torch.zeros(0, 4)
    gathered, scattered = padded_gather(exchange, nothing, 0), padded_scatter(exchange, nothing, 0)
    return tuple(gathered.shape), tuple(scattered.shape), tuple(exchange.all_reduce(nothing).shape)


def test_no_rows_on_any_rank_are_no_rows(ranks: GlooRanks) -> None:
    assert ranks.run(of_nothing) == [((0, 4),) * 3] * ranks.size


def strided() -> tuple[bool, int]:
    """A part of a wider tensor, and every other row of a longer one."""
    exchange = group()
    wide = rows_of(exchange.rank, 6, torch.float32, (8,))
    parts = [padded_gather(exchange, part, 6) for part in (wide[:, 2:5], wide[::2])]
    wants = [[rows_of(r, 6, torch.float32, (8,)) for r in range(exchange.size)] for _ in parts]
    padding = torch.zeros(3, 8)
    first = torch.equal(parts[0], torch.cat([w[:, 2:5] for w in wants[0]]))
    return first and torch.equal(parts[1], torch.cat([torch.cat([w[::2], padding]) for w in wants[1]])), len(parts)


def test_rows_that_lie_apart_are_gathered_right(ranks: GlooRanks) -> None:
    assert ranks.run(strided) == [(True, 2)] * ranks.size


def gather_a_prefill(lens: Sequence[int]) -> bool:
    """What a layer does with its new KV: each rank computes its rows, and reads all of them in order."""
    exchange = group()
    counts = np.array(lens, np.int32)
    table = np.zeros((len(lens), max(lens)), np.int32)
    step = split_step(
        num_decode=0, query_lens=counts, seq_lens=counts, page_table=table, page_size=4,
        rank=exchange.rank, size=exchange.size,
    )  # fmt: skip
    hidden = torch.randn(sum(lens), 6, generator=torch.Generator().manual_seed(7))
    gathered = padded_gather(exchange, hidden[torch.from_numpy(step.own_rows)], step.max_rank_len)
    return torch.equal(gathered[torch.from_numpy(step.gather_rows)], hidden)


def test_a_split_prefill_comes_back_in_its_order(ranks: GlooRanks) -> None:
    for lens in ((1,), (3,), (4,), (31,), (32,), (33,), (1, 200), (7, 1, 64, 5)):
        assert all(ranks.run(gather_a_prefill, lens)), lens


# --- plain exchanges --------------------------------------------------------------------------------------------------


def reduce_all(count: int, dtype: torch.dtype) -> tuple[bytes, bool, float]:
    """The bits of a sum over the ranks; whether it came in place; how far it is from the sum in float64."""
    exchange = group()
    seeds = [torch.Generator().manual_seed(rank) for rank in range(exchange.size)]
    parts = [torch.randn(count, generator=seed).to(dtype) for seed in seeds]
    given = parts[exchange.rank].clone()
    got = exchange.all_reduce(given)
    exact = torch.stack(parts).double().sum(0)
    return got.view(torch.uint8).numpy().tobytes(), got is given, float((got.double() - exact).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_has_the_same_bits_on_every_rank(ranks: GlooRanks, dtype: torch.dtype) -> None:
    for count in (1, 3, 64, 1000, 70_001):
        results = ranks.run(reduce_all, count, dtype)
        assert len({bits for bits, _, _ in results}) == 1, f"{count} elements"
        assert all(in_place for _, in_place, _ in results)
        assert max(far for _, _, far in results) < (0.1 if dtype == torch.bfloat16 else 1e-5)


def plain() -> tuple[list[int], list[int], list[int], dict[str, int], dict[str, int]]:
    exchange = forward_group("gloo", 60.0)
    own = torch.tensor([exchange.rank + 1, 10], dtype=torch.int64)
    gathered = exchange.all_gather(own).tolist()
    scattered = exchange.reduce_scatter(torch.arange(exchange.size, dtype=torch.int64) * (exchange.rank + 1)).tolist()
    told = exchange.broadcast(own).tolist()
    return gathered, scattered, told, exchange.traffic.calls, exchange.traffic.num_bytes


def test_gather_scatter_and_broadcast_are_in_rank_order_and_counted(ranks: GlooRanks) -> None:
    n = ranks.size
    for rank, (gathered, scattered, told, calls, num_bytes) in enumerate(ranks.run(plain)):
        assert gathered == [value for r in range(n) for value in (r + 1, 10)]
        assert scattered == [rank * sum(range(1, n + 1))]
        assert told == [1, 10]
        assert calls == {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
        assert num_bytes == {"all_gather": 16, "reduce_scatter": 8 * n, "broadcast": 16}


# --- faults -----------------------------------------------------------------------------------------------------------

BOUND_S, LONG_S = 1.5, 120.0


def without_the_last(folder: Path) -> None:
    """The last rank hangs, then dies; the others write down how each of their calls ends, and end too."""
    hung = {name: forward_group("gloo", BOUND_S) for name in ("broadcast", "reduce_scatter")}
    dead = forward_group("gloo", LONG_S)
    for exchange in (*hung.values(), dead):
        exchange.all_reduce(torch.ones(1))  # all are connected
    if dead.rank == dead.size - 1:
        time.sleep(3 * BOUND_S)
        os._exit(3)
    ends = [(*broken_off(exchange, name), "hung") for name, exchange in hung.items()]
    ends.append((*broken_off(dead, "all_gather"), "dead"))
    (folder / f"{dead.rank}.json").write_text(json.dumps(ends))
    os._exit(0)  # so that those who wait for this rank, not for the dead one, are told too


def broken_off(exchange: GroupCollectives, operation: str) -> tuple[str, float]:
    """What the call raises, and after how many seconds."""
    began = time.monotonic()
    try:
        getattr(exchange, operation)(torch.ones(exchange.size * 2))
        exchange.all_reduce(torch.ones(1))  # who broadcasts need not wait for those who listen
    except PeerLost as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def test_a_peer_that_hangs_or_dies_is_an_error_within_the_bound(ranks: GlooRanks, tmp_path: Path) -> None:
    ranks.run_dying(set(range(ranks.size)), without_the_last, tmp_path)
    for rank in range(ranks.size - 1):
        for said, after, how in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert "broke off" in said, f"rank {rank} noticed nothing ({how})"
            assert after < (2 * BOUND_S + 5 if how == "hung" else 20), f"rank {rank} noticed late ({how})"
