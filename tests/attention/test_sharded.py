"""Sharded grouped-query attention against one rank over one pool: outputs, and what every rank's pool holds after."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.attention.choice import Pair, make_pair
from benthic.attention.interface import AttentionBackend, AttentionSpec
from benthic.attention.sharded import ShardedBackend
from benthic.attention.torch_backend import TorchBackend
from benthic.attention.triton_backend import TritonBackend
from benthic.forward import ForwardBatch
from benthic.parallel.cp_split import RankStep
from tests.attention.rank_steps import MIXTURES, Lanes, deal, make_batch, num_pages, own_part, rank_forward
from tests.support.thread_ranks import ThreadCollectives, run_ranks

PAGE, LAYERS, HEADS, SHARED, DIM = 4, 2, 4, 2, 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spec_of(dtype: torch.dtype = torch.float32) -> AttentionSpec:
    return AttentionSpec(
        num_layers=LAYERS, num_heads=HEADS, num_kv_heads=SHARED, head_dim=DIM, scale=DIM**-0.5, page_size=PAGE,
        dtype=dtype, device=torch.device("cpu"), max_seq_len=256,
    )  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """A step's tensors: [layers, T, heads, d]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def draw(cls, tokens: int, dtype: torch.dtype, rng: torch.Generator) -> "Inputs":
        fused = torch.randn((LAYERS, tokens, HEADS + 2 * SHARED, DIM), generator=rng).to(dtype)
        return cls(*fused.split([HEADS, SHARED, SHARED], dim=2))

    def of(self, part: RankStep, rows: int) -> "Inputs":
        """A rank's part, with rows of padding behind."""
        each = (own_part(x.transpose(0, 1), part, rows).transpose(0, 1) for x in (self.q, self.k, self.v))
        return Inputs(*each)


def attend_all(backend: AttentionBackend, batch: ForwardBatch, inputs: Inputs) -> torch.Tensor:
    metadata = backend.begin(batch)
    layers = [backend.attend(i, inputs.q[i], inputs.k[i], inputs.v[i], batch, metadata) for i in range(LAYERS)]
    return torch.stack(layers, 1)  # [T, layers, H, d]


class Sequences:
    """Rows of up to `lens` tokens in one pool, and the same ones dealt out over the pools of `size` ranks."""

    def __init__(self, lens: Sequence[int], size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        counts = num_pages(lens, PAGE)
        order = torch.randperm(sum(counts) + 2, generator=self.rng).to(torch.int32)
        self.table = torch.zeros((len(lens), max(counts) + 1), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = order[sum(counts[:row]) : sum(counts[: row + 1])]
        shape = (LAYERS, len(order) + 1, 2, PAGE, SHARED, DIM)
        self.spec = spec_of(dtype)
        self.single = torch.randn(shape, generator=self.rng).to(dtype)
        self.lanes: Lanes = deal(self.table, counts, PAGE, size, seed)
        self.fill = torch.full((LAYERS, 2, PAGE, SHARED, DIM), 1e3, dtype=dtype)  # of others: shows where it is read
        self.pools = [self.lanes.pool(rank, self.single, self.fill) for rank in range(size)]

    def batch(self, firsts: Sequence[int], ends: Sequence[int], num_decode: int, rows: Sequence[int]) -> ForwardBatch:
        return make_batch(self.table[list(rows)], firsts, ends, num_decode, PAGE)

    def lanes_of(self, rows: Sequence[int]) -> Lanes:
        lanes = self.lanes
        return Lanes(lanes.size, PAGE, lanes.num_pages, lanes.table[list(rows)], lanes.pairs)


@dataclass(frozen=True)
class Step:
    """A single rank's batch, the lanes of its rows, and rows of padding for each rank."""

    batch: ForwardBatch
    lanes: Lanes
    padding: int = 0


def check_steps(
    world: Sequences, steps: Sequence[Step], kind: type[AttentionBackend] = TorchBackend
) -> list[tuple[str, tuple[int, ...]]]:
    """The steps on all ranks and on one alone; the calls of a rank."""
    spec = world.spec
    inputs = [Inputs.draw(step.batch.num_tokens, spec.dtype, world.rng) for step in steps]
    alone = TorchBackend(spec, world.single)
    expected = [attend_all(alone, step.batch, drawn) for step, drawn in zip(steps, inputs, strict=True)]
    tolerance = TOLERANCE[spec.dtype]

    def body(group: ThreadCollectives) -> tuple[list[torch.Tensor], list[tuple[str, tuple[int, ...]]]]:
        backend = make_pair(Pair(kind, kind), spec, {"target_kv": world.pools[group.rank]}, group)
        assert isinstance(backend, ShardedBackend)
        decoded = []
        for step, drawn, wanted in zip(steps, inputs, expected, strict=True):
            part, own = rank_forward(step.batch, step.lanes, group, step.padding)
            out = attend_all(backend, own, drawn.of(part, len(own.input_ids)))
            assert out.dtype == spec.dtype
            assert not out[own.num_tokens :].any()
            wanted = wanted[torch.from_numpy(part.own_rows)]
            torch.testing.assert_close(out[: own.num_tokens], wanted, atol=tolerance, rtol=tolerance)
            decoded.append(out[: own.num_decode])
        return decoded, group.calls

    results = run_ranks(world.lanes.size, body)
    for decoded, _ in results:  # every rank goes on with the same numbers
        assert all(torch.equal(one, other) for one, other in zip(decoded, results[0][0], strict=True))
    for rank, pool in enumerate(world.pools):
        assert torch.equal(pool, world.lanes.pool(rank, world.single, world.fill))
    return results[0][1]


@pytest.mark.parametrize("kind", [TorchBackend, TritonBackend])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("num_decode", "seq_lens", "query_lens"), MIXTURES)
def test_a_mixed_step(
    num_decode: int, seq_lens: list[int], query_lens: list[int], size: int, kind: type[AttentionBackend]
) -> None:
    world = Sequences(seq_lens, size)
    firsts = [n - q for n, q in zip(seq_lens, query_lens, strict=True)]
    batch = world.batch(firsts, seq_lens, num_decode, range(len(seq_lens)))
    calls = check_steps(world, [Step(batch, world.lanes, padding=3 * (size == 4))], kind)
    context = any(firsts[num_decode:])
    per_layer = (num_decode > 0) + (len(seq_lens) > num_decode) + context
    assert [name for name, _ in calls] == ["all_gather"] * (LAYERS * per_layer)


def test_one_rank_has_a_plain_backend() -> None:
    pools = {"target_kv": Sequences([9], 1).single}
    alone = run_ranks(1, lambda group: make_pair(Pair(TorchBackend, TorchBackend), spec_of(), pools, group))
    assert type(alone[0]) is TorchBackend


def test_bfloat16() -> None:
    num_decode, seq_lens, query_lens = MIXTURES[-2]
    world = Sequences(seq_lens, 2, torch.bfloat16)
    firsts = [n - q for n, q in zip(seq_lens, query_lens, strict=True)]
    batch = world.batch(firsts, seq_lens, num_decode, range(len(seq_lens)))
    calls = check_steps(world, [Step(batch, world.lanes)])
    assert len(calls) == 3 * LAYERS


@settings(max_examples=25, deadline=None)
@given(data=st.data(), size=st.sampled_from([2, 3, 4]))
def test_sequences_that_grow_in_chunks_and_then_decode(data: st.DataObject, size: int) -> None:
    """One backend over many steps: its work pool grows, and is never clean but at the start."""
    lens = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    longest = [n + 3 for n in lens]
    world = Sequences(longest, size, seed=data.draw(st.integers(0, 99)))
    done, steps = [0] * len(lens), []
    for _ in range(12):
        decode = [r for r, n in enumerate(done) if lens[r] <= n < longest[r] and data.draw(st.booleans())]
        prefill = [r for r, n in enumerate(done) if n < lens[r] and data.draw(st.booleans())]
        rows = decode + prefill
        if not rows:
            continue
        counts = [1] * len(decode) + [data.draw(st.integers(1, lens[r] - done[r])) for r in prefill]
        firsts = [done[r] for r in rows]
        for row, count in zip(rows, counts, strict=True):
            done[row] += count
        batch = world.batch(firsts, [done[r] for r in rows], len(decode), rows)
        steps.append(Step(batch, world.lanes_of(rows), data.draw(st.integers(0, 2))))
    calls = check_steps(world, steps)
    assert len(calls) >= LAYERS * len(steps)
