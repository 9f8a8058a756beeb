"""Sharded attention over latents against one rank over one pool: selections, outputs, and what pools hold after."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.attention import partial
from benthic.attention.choice import Pair, make_pair
from benthic.attention.latent import IndexNorm, LatentBackend, LatentSpec, LayerNorms
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.attention.latent_triton import TritonLatentBackend
from benthic.attention.sharded_latent import ShardedLatentBackend
from benthic.forward import ForwardBatch
from benthic.parallel.cp_split import RankStep
from tests.attention.rank_steps import MIXTURES, deal, num_pages, own_part, rank_forward
from tests.support.latent_steps import QUERY_LATENT, Drawn, StepCase, first_product, latent_spec, step_case, turned
from tests.support.thread_ranks import ThreadCollectives, run_ranks

CPU, PAGE, K = torch.device("cpu"), 4, 8
ROWS = ("projected", "index_projected", "q_latent", "q_rope", "queries", "weights")
FORMATS = [
    {"topk": None},
    {"topk": None, "fp8": True},
    {"topk": K},
    {"topk": K, "fp8": True, "index_fp8": True},
    {"topk": K, "index_fp8": True},
]


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a forward of both layers gave: the second selects for itself, or shares what the first selected."""

    queries: torch.Tensor  # [T, 2, Q]
    selected: torch.Tensor | None  # int32 [T, layers that select, K]
    out: torch.Tensor  # [T, 2, H, R]


def forward(backend: LatentBackend, drawn: Drawn) -> Found:
    batch, spec = drawn.batch, backend.spec
    metadata, selected = backend.begin(batch), None
    queries, selections, outs = [], [], []
    for layer in range(spec.num_layers):
        indexes = spec.index is not None and layer < spec.index.num_layers
        index = IndexNorm(ordinal=layer, weight=drawn.index_norm[0], bias=drawn.index_norm[1], interleaved=True)
        norms = LayerNorms(
            query=drawn.norm.new_ones(QUERY_LATENT), latent=drawn.norm, eps=1e-5, index=index if indexes else None
        )
        queries.append(backend.take_in(layer, first_product(drawn, 1 - 2 * layer), norms, drawn.turn, batch))
        if indexes and backend.needs_selection(metadata):
            selected = backend.select(layer, *turned(backend, drawn), batch, metadata)
            selections.append(selected)
        outs.append(backend.attend(layer, drawn.q_latent, drawn.q_rope, selected, batch, metadata))
    return Found(torch.stack(queries, 1), torch.stack(selections, 1) if selections else None, torch.stack(outs, 1))


def part_of(drawn: Drawn, part: RankStep, batch: ForwardBatch) -> Drawn:
    """The rank's rows, zeros for those of padding."""
    rows = len(batch.input_ids)
    own = {name: own_part(getattr(drawn, name), part, rows) for name in ROWS}
    return dataclasses.replace(
        drawn, batch=batch, turn=dataclasses.replace(drawn.turn, positions=batch.positions), **own
    )


def sets(selected: torch.Tensor) -> list[list[int]]:
    """Each row's positions, rising; none twice, -1 behind only."""
    rows = []
    for row in selected.tolist():
        chosen = [position for position in row if position >= 0]
        assert row[: len(chosen)] == chosen
        assert len(set(chosen)) == len(chosen)
        rows.append(sorted(chosen))
    return rows


def check_step(
    case: StepCase, size: int, kind: type[LatentBackend] = TorchLatentBackend, padding: int = 0, times: int = 1
) -> list[tuple[str, tuple[int, ...]]]:
    """The step on all ranks and on one alone; the calls of a rank."""
    spec, batch = case.spec, case.step.batch
    alone = case.new_backend(TorchLatentBackend)
    one = {"target_kv": alone.latents}
    if alone.index_keys is not None:
        one["index_k"] = alone.index_keys
    lanes = deal(batch.page_table, num_pages(batch.seq_lens_host, PAGE), PAGE, size)
    fills = {name: torch.full_like(pool[:, 0], 1) for name, pool in one.items()}
    lane_pools = [{name: lanes.pool(r, pool, fills[name]) for name, pool in one.items()} for r in range(size)]
    expected = forward(alone, case.step)

    def body(group: ThreadCollectives) -> tuple[Found, RankStep, int, list[tuple[str, tuple[int, ...]]]]:
        backend = make_pair(Pair(kind, kind), spec, lane_pools[group.rank], group)
        assert isinstance(backend, ShardedLatentBackend)
        part, own = rank_forward(batch, lanes, group, padding)
        for _ in range(times):
            found = forward(backend, part_of(case.step, part, own))
        return found, part, own.num_tokens, group.calls

    results = run_ranks(size, body)
    for found, part, rows, calls in results:
        own = torch.from_numpy(part.own_rows)
        torch.testing.assert_close(found.queries[:rows], expected.queries[own], atol=1e-6, rtol=0)
        torch.testing.assert_close(found.out[:rows], expected.out[own], atol=2e-5, rtol=2e-5)
        assert not found.out[rows:].any()
        assert [name for name, _ in calls] == [name for name, _ in results[0][3]]
        assert (found.selected is None) == (expected.selected is None)
        if found.selected is not None and expected.selected is not None:
            assert sets(found.selected[:rows].flatten(0, 1)) == sets(expected.selected[own].flatten(0, 1))
            assert (found.selected[rows:] == -1).all()
            assert torch.equal(found.selected[: part.num_decode], results[0][0].selected[: part.num_decode])  # type: ignore[index]
        assert torch.equal(found.out[: part.num_decode], results[0][0].out[: part.num_decode])
    for rank, pools in enumerate(lane_pools):
        for name, pool in pools.items():
            assert torch.equal(pool, lanes.pool(rank, one[name], fills[name])), f"{name} of rank {rank}"
    return results[0][3]


def spec_with(**form: Any) -> LatentSpec:
    return latent_spec(CPU, page_size=PAGE, **form)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("num_decode", "seq_lens", "query_lens"), MIXTURES)
def test_a_mixed_step(
    num_decode: int, seq_lens: list[int], query_lens: list[int], size: int, form: dict[str, Any]
) -> None:
    case = step_case(spec_with(**form), seq_lens, query_lens, num_decode)
    calls = check_step(case, size, padding=3 * (size == 4))
    context = any(n > q for n, q in zip(seq_lens[num_decode:], query_lens[num_decode:], strict=True))
    per_layer = (num_decode > 0) + (len(seq_lens) > num_decode) + context
    candidates = form["topk"] is not None and max(seq_lens[:num_decode], default=0) > K
    assert len(calls) == 2 * per_layer + candidates
    assert {name for name, _ in calls} == {"all_gather"}


@pytest.mark.parametrize("form", FORMATS[2:], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_both_layers_index(size: int, form: dict[str, Any]) -> None:
    """The second layer's older keys are all zeros: scores by the dozen are equal, and the lowest positions win."""
    spec = spec_with(**form)
    assert spec.index is not None
    spec = dataclasses.replace(spec, index=dataclasses.replace(spec.index, num_layers=2))
    for num_decode, seq_lens, query_lens in MIXTURES[9:]:
        calls = check_step(step_case(spec, seq_lens, query_lens, num_decode), size)
        candidates = [shape for _, shape in calls if shape[-1] <= K]
        assert len(candidates) == 2 * (max(seq_lens[:num_decode]) > K)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_other_backend_over_the_work_pool_and_over_own_pages(form: dict[str, Any]) -> None:
    for num_decode, seq_lens, query_lens in (MIXTURES[7], MIXTURES[11]):
        case = step_case(spec_with(**form), seq_lens, query_lens, num_decode)
        assert check_step(case, 2, TritonLatentBackend)


def test_a_work_pool_that_is_not_clean_changes_nothing() -> None:
    num_decode, seq_lens, query_lens = MIXTURES[11]
    case = step_case(spec_with(topk=K), seq_lens, query_lens, num_decode)
    once = check_step(case, 2)
    assert check_step(case, 2, times=3) == once * 3


def test_rows_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "_BLOCK_BYTES", {"cpu": 1})
    for form in FORMATS:
        num_decode, seq_lens, query_lens = MIXTURES[11]
        for kind in (TorchLatentBackend, TritonLatentBackend):
            assert check_step(step_case(spec_with(**form), seq_lens, query_lens, num_decode), 2, kind)


def test_a_segment_within_k_beside_one_that_passes_it() -> None:
    """The ranks' own needs differ; only what the whole step needs may decide an exchange."""
    for seq_lens, query_lens, num_decode in (([K + 1], [K + 1], 0), ([3, K + 1], [1, 2], 1), ([K + 1, 2], [1, 2], 1)):
        assert check_step(step_case(spec_with(topk=K), seq_lens, query_lens, num_decode), 4)


def test_index_keys_of_the_context_travel_only_to_be_selected_from() -> None:
    short = check_step(step_case(spec_with(topk=64), [24], [8], 0), 2)
    long = check_step(step_case(spec_with(topk=K), [24], [8], 0), 2)
    assert short[0] == ("all_gather", (2, PAGE * 48 * 4))
    assert long[0] == ("all_gather", (2, PAGE * (48 + 32) * 4))
    assert short[1:] == long[1:]
    beside = check_step(step_case(spec_with(topk=24), [30, 24], [1, 8], 1), 2)  # a decode row selects, no prefill row
    assert beside[0] == short[0]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), form=st.sampled_from(FORMATS), size=st.sampled_from([2, 3, 4]))
def test_any_step(data: st.DataObject, form: dict[str, Any], size: int) -> None:
    seq_lens = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    num_decode = data.draw(st.integers(0, len(seq_lens)))
    query_lens = [1] * num_decode + [data.draw(st.integers(1, n)) for n in seq_lens[num_decode:]]
    case = step_case(spec_with(**form), seq_lens, query_lens, num_decode, seed=data.draw(st.integers(0, 99)))
    assert check_step(case, size, padding=data.draw(st.integers(0, 2)))
