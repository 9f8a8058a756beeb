"""The torch latent backend against attention in float64, one query at a time; case F5: at and beyond top-k."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.attention import latent_torch
from benthic.attention.latent import LatentBackend, LatentSpec
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.kernels.latent_records import read_latents
from tests.support.latent_steps import Drawn, StepCase, attend, latent_spec, select, step_case, write

K = 24
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MIXTURES = [  # decode rows, contexts, new tokens
    (1, [1], [1]),
    (1, [K], [1]),
    (1, [K + 1], [1]),
    (0, [1], [1]),
    (0, [4 * K], [4 * K]),
    (0, [100], [7]),
    (5, [K - 1, K, K + 1, 2 * K, 4 * K], [1] * 5),
    (0, [K - 1, K, K + 1, 2 * K, 4 * K], [K - 1, 1, K + 1, K, 5]),
    (3, [K - 1, 4 * K, K + 1, 2 * K, K], [1, 1, 1, K + 3, K]),
    (2, [3, K, K - 2], [1, 1, K - 2]),  # nothing passes K
]


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens_of(step: Drawn) -> list[tuple[int, int]]:
    """(row, position) of each token of the step."""
    batch = step.batch
    rows = [*range(batch.num_decode)]
    for row, count in enumerate(batch.query_lens_host, batch.num_decode):
        rows += [row] * count
    return list(zip(rows, batch.positions.tolist(), strict=True))


def stored(pool: torch.Tensor, step: Drawn, row: int, count: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and offsets of a row's first `count` tokens."""
    positions = torch.arange(count, device=pool.device)
    return step.batch.page_table[row].long()[positions // page_size], positions % page_size


def index_keys(backend: LatentBackend, step: Drawn, row: int, count: int) -> torch.Tensor:
    """float64 [count, E] as the pool holds them."""
    spec, pool = backend.spec, backend.index_keys
    assert spec.index is not None
    assert pool is not None
    pages, offsets = stored(pool, step, row, count, spec.page_size)
    if not spec.index.fp8:
        return pool[0, pages, offsets].double()
    size = spec.index.head_dim
    first = offsets.unsqueeze(1) * size + torch.arange(size, device=pool.device)
    codes = pool[0, pages.unsqueeze(1), first].view(torch.float8_e4m3fn)
    last = spec.page_size * size + offsets.unsqueeze(1) * 4 + torch.arange(4, device=pool.device)
    return codes.double() * pool[0, pages.unsqueeze(1), last].view(torch.float32).double()


def turned_queries(step: Drawn, rope_dim: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 queries [T, I, E] with the first P turned, rounded as they are when multiplied, and their weights."""
    cos, sin = step.turn.table[step.turn.positions].double().unsqueeze(1).chunk(2, -1)
    queries = step.queries.double()
    a, b = queries[..., 0:rope_dim:2], queries[..., 1:rope_dim:2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    queries = torch.cat((turned, queries[..., rope_dim:]), -1)
    if not fp8:
        return queries.to(step.queries.dtype).double(), step.weights.double()
    scales = (queries.float().abs().amax(-1, keepdim=True) / 448).double()
    return (queries / scales).float().to(torch.float8_e4m3fn).double() * scales, step.weights.double()


def spelt_out(backend: LatentBackend, step: Drawn) -> tuple[list[set[int]], torch.Tensor]:
    """Every token's selection (all positions where none is needed) and the result [T, H, R] over it, of layer 1."""
    spec = backend.spec
    q = torch.cat((step.q_latent, step.q_rope), -1).double()
    index = spec.index
    if index is not None:
        queries, weights = turned_queries(step, spec.rope_dim, index.fp8)
    selections, out = [], torch.empty(step.q_latent.shape, dtype=torch.float64, device=q.device)
    for token, (row, position) in enumerate(tokens_of(step)):
        pages, offsets = stored(backend.latents, step, row, position + 1, spec.page_size)
        entries = read_latents(backend.latents[1], pages, offsets, spec.rank).double()
        chosen = list(range(position + 1))
        if index is not None:
            keys = index_keys(backend, step, row, position + 1)
            scores = (weights[token] @ (queries[token] @ keys.T).relu()).float().tolist()
            chosen = sorted(chosen, key=lambda p: (-scores[p], p))[: index.topk]
        selections.append(set(chosen))
        probs = (q[token] @ entries[chosen].T * spec.scale).softmax(-1)
        out[token] = probs @ entries[chosen][:, : spec.rank]
    return selections, out


def as_sets(selected: torch.Tensor) -> list[set[int]]:
    """Each token's positions; none stands there twice, and -1 only behind the last."""
    rows = selected.tolist()
    for row in rows:
        chosen = [p for p in row if p >= 0]
        assert len(set(chosen)) == len(chosen)
        assert row == chosen + [-1] * (len(row) - len(chosen))
    return [{p for p in row if p >= 0} for row in rows]


def check(case: StepCase) -> None:
    backend = case.new_backend(TorchLatentBackend)
    write(backend, case.step)
    selections, expected = spelt_out(backend, case.step)
    selected = select(backend, case.step)
    if selected is None:
        assert case.spec.index is None or max(case.step.batch.seq_lens_host) <= case.spec.index.topk
    else:
        assert as_sets(selected) == selections
    out = attend(backend, case.step, selected)
    assert out.dtype == case.spec.dtype
    tolerance = TOLERANCE[case.spec.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_decode", "seq_lens", "query_lens"), MIXTURES)
@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_mixed_rows_select_and_attend_as_spelt_out(
    num_decode: int, seq_lens: list[int], query_lens: list[int], dtype: torch.dtype, fp8: bool, device: str
) -> None:
    """fp8: within the same tolerance of float64 over what the pool holds, its scales applied."""
    spec = latent_spec(torch.device(device), dtype=dtype, topk=K, fp8=fp8, index_fp8=fp8)
    check(step_case(spec, seq_lens, query_lens, num_decode))


@pytest.mark.parametrize(("num_decode", "seq_lens", "query_lens"), MIXTURES)
def test_without_an_indexer_all_is_dense(num_decode: int, seq_lens: list[int], query_lens: list[int]) -> None:
    check(step_case(latent_spec(torch.device("cpu"), topk=None), seq_lens, query_lens, num_decode))


@settings(max_examples=40, deadline=None)
@given(
    decode=st.lists(st.integers(1, 70), max_size=5),
    prefill=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=3),
    topk=st.sampled_from([1, 7, 32, None]),
    page_size=st.sampled_from([1, 4, 32]),
)
def test_random_batches(decode: list[int], prefill: list[tuple[int, int]], topk: int | None, page_size: int) -> None:
    if decode or prefill:
        lens = decode + [new + cached for new, cached in prefill]
        spec = latent_spec(torch.device("cpu"), topk=topk, page_size=page_size)
        check(step_case(spec, lens, [1] * len(decode) + [new for new, _ in prefill], len(decode), seed=sum(lens)))


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = step_case(latent_spec(torch.device("cpu"), topk=K), [90, 33, 60, 96], [1, 1, 60, 50], 2)
    monkeypatch.setattr(latent_torch, "BLOCK_BYTES", 1)
    check(case)
    monkeypatch.setattr(latent_torch, "BLOCK_BYTES", 20_000)
    check(case)


# --- case F5 ----------------------------------------------------------------------------------------------------------


def drawn_rows(drawn: Drawn, rows: slice, num_decode: int) -> Drawn:
    """Tokens `rows` of a single sequence's, as a step of their own."""
    count, batch = rows.stop - rows.start, drawn.batch
    cut = dataclasses.replace(
        batch,
        num_tokens=count,
        num_decode=num_decode,
        max_seq_len=rows.stop,
        positions=batch.positions[rows],
        kv_slots=batch.kv_slots[rows],
        seq_lens=torch.tensor([rows.stop], dtype=torch.int32),
        query_lens_host=() if num_decode else (count,),
        seq_lens_host=(rows.stop,),
    )
    names = ("projected", "index_projected", "q_latent", "q_rope", "queries", "weights")
    tensors: dict[str, Any] = {name: getattr(drawn, name)[rows] for name in names}
    return dataclasses.replace(
        drawn, batch=cut, turn=dataclasses.replace(drawn.turn, positions=cut.positions), **tensors
    )


def in_chunks(spec: LatentSpec, whole: StepCase, sizes: Sequence[int]) -> tuple[list[set[int]], torch.Tensor]:
    """Selections and results of a whole prompt, in chunks of these sizes; a chunk of size 0 is a decode of one."""
    backend = whole.new_backend(TorchLatentBackend)
    selections: list[set[int]] = []
    outs, start = [], 0
    for size in sizes:
        step = drawn_rows(whole.step, slice(start, start + (size or 1)), 0 if size else 1)
        start += size or 1
        write(backend, step)
        selected = select(backend, step)
        if selected is None:
            selections += [set(range(p + 1)) for p in step.batch.positions.tolist()]
        else:
            selections += as_sets(selected)
        outs.append(attend(backend, step, selected))
    assert start == whole.step.batch.num_tokens
    return selections, torch.cat(outs)


def repeated(drawn: Drawn) -> Drawn:
    """Its first token again and again."""
    names = ("projected", "index_projected", "q_latent", "q_rope", "queries", "weights")
    same = {name: getattr(drawn, name)[:1].expand_as(getattr(drawn, name)) for name in names}
    return dataclasses.replace(drawn, **same)


@pytest.mark.parametrize("kind", ["random", "repeated token", "no scores", "coarse scores", "fp8"])
def test_f5_the_selection_is_the_same_for_every_chunk_size_and_while_decoding(kind: str) -> None:
    spec = latent_spec(torch.device("cpu"), topk=K, index_fp8=kind == "fp8", fp8=kind == "fp8")
    case = step_case(spec, [4 * K], [4 * K], 0)
    if kind == "repeated token":
        case = dataclasses.replace(case, step=repeated(case.step))
    elif kind == "no scores":
        case = dataclasses.replace(case, step=dataclasses.replace(case.step, weights=case.step.weights * 0))
    elif kind == "coarse scores":  # every key scores one of few values, so that most places of K are ties
        keys = case.step.index_projected.sign()
        queries = torch.zeros_like(case.step.queries)
        queries[..., -1] = 1.0
        case = dataclasses.replace(case, step=dataclasses.replace(case.step, index_projected=keys, queries=queries))
    expected, results = in_chunks(spec, case, [4 * K])
    for position, chosen in enumerate(expected):
        assert len(chosen) == min(position + 1, K)
        assert chosen <= set(range(position + 1))
        if kind == "no scores":
            assert chosen == set(range(min(position + 1, K)))
    for size in range(1, 4 * K):
        whole, rest = divmod(4 * K, size)
        selections, outs = in_chunks(spec, case, [size] * whole + [rest] * bool(rest))
        assert selections == expected
        torch.testing.assert_close(outs, results, rtol=1e-5, atol=1e-5)
    selections, outs = in_chunks(spec, case, [K - 2] + [0] * (3 * K + 2))  # crosses K while decoding
    assert selections == expected
    torch.testing.assert_close(outs, results, rtol=1e-5, atol=1e-5)


# --- graphs and padding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [1, 4])
def test_padded_graph_rows_change_nothing(padded: int, device: str) -> None:
    """In a graph the lengths are the device's; rows of padding read and write the scratch page."""
    lens = [5, 100, K + 1] + [1] * padded
    case = step_case(latent_spec(torch.device(device), topk=K), lens, [1] * len(lens), len(lens))
    batch = case.step.batch
    batch.page_table[3:] = case.num_pages
    batch.kv_slots[3:] = case.num_pages * case.spec.page_size
    captured = dataclasses.replace(
        batch, max_seq_len=case.spec.max_seq_len, seq_lens_host=(), query_lens_host=(), in_graph=True
    )
    backend = case.new_backend(TorchLatentBackend)
    write(backend, case.step)
    selections, expected = spelt_out(backend, case.step)
    selected = select(backend, case.step, captured)
    assert selected is not None
    assert as_sets(selected)[:3] == selections[:3]
    assert as_sets(selected)[3:] == [{0}] * padded
    out = attend(backend, case.step, selected, captured)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:3].double(), expected[:3], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("topk", [K, None])
def test_rows_of_padding_behind_a_batch_are_zero(topk: int | None) -> None:
    case = step_case(latent_spec(torch.device("cpu"), topk=topk), [40, 60], [1, 30], 1)
    backend = case.new_backend(TorchLatentBackend)
    write(backend, case.step)
    names = ("q_latent", "q_rope", "queries", "weights")
    nans = {name: torch.full_like(getattr(case.step, name)[:3], float("nan")) for name in names}
    padded = dataclasses.replace(case.step, **{n: torch.cat([getattr(case.step, n), nans[n]]) for n in names})
    positions = torch.cat([case.step.batch.positions, torch.zeros(3, dtype=torch.int64)])
    padded = dataclasses.replace(
        padded,
        batch=dataclasses.replace(case.step.batch, positions=positions),
        turn=dataclasses.replace(case.step.turn, positions=positions),
    )
    selected = select(backend, padded)
    assert selected is None or (selected[31:] == -1).all()
    out = attend(backend, padded, selected)
    assert not out[31:].any()
    torch.testing.assert_close(out[:31], attend(backend, case.step, select(backend, case.step)))


def test_attention_reads_what_is_selected_and_nothing_else() -> None:
    """A layer may share the selection of one below, whatever it holds."""
    case = step_case(latent_spec(torch.device("cpu"), topk=K), [90, 70], [1, 20], 1)
    backend = case.new_backend(TorchLatentBackend)
    write(backend, case.step)
    forced = torch.full((21, K), -1, dtype=torch.int32)
    forced[:, :2] = torch.tensor([3, 40], dtype=torch.int32)
    out = attend(backend, case.step, forced)
    backend.latents[1, case.step.batch.page_table[:, 0].long(), 4] = 100.0  # position 4 of both rows
    torch.testing.assert_close(attend(backend, case.step, forced), out)
    backend.latents[1, case.step.batch.page_table[:, 0].long(), 3] = 100.0
    changed = (attend(backend, case.step, forced) - out).abs().amax((1, 2))
    assert (changed > 1).all()


def test_it_names_what_it_cannot_run() -> None:
    assert TorchLatentBackend.unsupported(latent_spec(torch.device("cpu"), fp8=True)) is None
    odd = latent_spec(torch.device("cpu"), rank=30, fp8=True)
    assert "latents of 30 numbers can't be fp8" in str(TorchLatentBackend.unsupported(odd))
