"""The GPU's latent backend, on a CPU over the kernels' references, beside the torch backend."""

import dataclasses
import weakref
from typing import Any

import pytest
import torch

from benthic.attention import latent_triton
from benthic.attention.latent import LatentSpec
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.attention.latent_triton import TritonLatentBackend
from tests.support.latent_steps import StepCase, attend, latent_spec, select, step_case, write

CPU = torch.device("cpu")
MIXTURES = [  # decode rows, contexts, new tokens; K is 24
    (3, [1, 24, 100], [1, 1, 1]),
    (0, [17, 64], [17, 64]),  # one below K, one that passes it within the chunk
    (0, [90, 24, 25, 70], [20, 24, 2, 1]),
    (2, [33, 16, 40, 9, 130], [1, 1, 40, 1, 30]),
    (2, [3, 24, 130], [1, 1, 30]),  # decode rows below K beside a prefill past it
    (2, [7, 24, 12], [1, 1, 12]),  # nothing to select
]


def as_sets(selected: torch.Tensor) -> list[set[int]]:
    """Each row's positions; none may stand there twice, and -1 only behind the last."""
    rows = selected.tolist()
    for row in rows:
        chosen = [p for p in row if p >= 0]
        assert len(set(chosen)) == len(chosen)
        assert row[: len(chosen)] == chosen
    return [{p for p in row if p >= 0} for row in rows]


def agree(case: StepCase) -> None:
    """Pools, selections and results of the two backends."""
    ours, reference = case.new_backend(TritonLatentBackend), case.new_backend(TorchLatentBackend)
    for backend in (ours, reference):
        write(backend, case.step)
    torch.testing.assert_close(ours.latents, reference.latents, rtol=0, atol=0 if case.spec.fp8 else 1e-6)
    selected, expected = select(ours, case.step), select(reference, case.step)
    if expected is None:
        assert selected is None
    else:
        assert selected is not None
        assert as_sets(selected) == as_sets(expected)
    out, wanted = attend(ours, case.step, selected), attend(reference, case.step, expected)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("fp8", "index_fp8"), [(False, False), (True, True)])
@pytest.mark.parametrize(("num_decode", "seq_lens", "query_lens"), MIXTURES)
def test_any_mixture_of_rows_agrees_with_the_torch_backend(
    num_decode: int, seq_lens: list[int], query_lens: list[int], fp8: bool, index_fp8: bool
) -> None:
    agree(step_case(latent_spec(CPU, fp8=fp8, index_fp8=index_fp8), seq_lens, query_lens, num_decode))


@pytest.mark.parametrize(("num_decode", "seq_lens", "query_lens"), MIXTURES)
def test_without_an_indexer_all_is_dense(num_decode: int, seq_lens: list[int], query_lens: list[int]) -> None:
    agree(step_case(latent_spec(CPU, topk=None), seq_lens, query_lens, num_decode))


@pytest.mark.parametrize("topk", [24, None])
def test_a_row_that_reads_its_fp8_context_more_than_once_over_has_it_unpacked(
    topk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for both of its stretches, one copy at a time; the others read codes."""
    case = step_case(latent_spec(CPU, topk=topk, fp8=True), [30, 24, 90, 130, 40], [1, 1, 2, 30, 30], 1)
    backend = case.new_backend(TritonLatentBackend)
    write(backend, case.step)
    selected = select(backend, case.step)
    made: list[weakref.ref[torch.Tensor]] = []
    unpack = latent_triton.latent_unpack

    def watched(latents: torch.Tensor, *rest: Any, **given: Any) -> torch.Tensor:
        assert all(scratch() is None for scratch in made)
        scratch = unpack(latents, *rest, **given)
        made.append(weakref.ref(scratch))
        numbers.append(rest[1])
        return scratch

    numbers: list[int] = []
    monkeypatch.setattr(latent_triton, "latent_unpack", watched)
    out = attend(backend, case.step, selected)
    # rows of 24, 90, 130 and 40 positions, of which queries read 24, 48, 720 and 570; dense 24, 179, 3465, 765
    assert numbers == ([130, 40] if topk else [90, 130, 40])
    reference = case.new_backend(TorchLatentBackend)
    write(reference, case.step)
    torch.testing.assert_close(out, attend(reference, case.step, selected), rtol=1e-4, atol=1e-4)


def test_scores_come_in_passes_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    case = step_case(latent_spec(CPU), [150, 99, 40, 130], [1, 1, 1, 90], 3)
    backend = case.new_backend(TritonLatentBackend)
    write(backend, case.step)
    whole, seen = select(backend, case.step), []
    assert whole is not None
    topk_select = latent_triton.topk_select

    def watched(scores: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(scores.nbytes)
        return topk_select(scores, *rest)

    monkeypatch.setattr(latent_triton, "topk_select", watched)
    for budget, passes in ((3 * 4096, 1 + 30), (4096, 3 + 90), (1, 3 + 90)):  # scores' rows are 1024 wide
        seen.clear()
        monkeypatch.setattr(latent_triton, "SCORE_BYTES", budget)
        parts = select(backend, case.step)
        assert parts is not None
        assert torch.equal(parts, whole)
        # of the 90 new tokens none is at a position below K
        assert len(seen) == passes
        assert max(seen) <= max(budget, 4096)


def test_a_static_decode_batch_selects_by_its_bound_and_padding_reads_scratch() -> None:
    """As in a graph: the lengths are the device's, the bound is the runner's, and two rows are padding."""
    case = step_case(latent_spec(CPU), [5, 100, 1, 1], [1, 1, 1, 1], 4)
    eager = step_case(latent_spec(CPU), [5, 100, 1, 1], [1, 1, 1, 1], 4)
    batch = dataclasses.replace(
        case.step.batch, max_seq_len=case.spec.max_seq_len, seq_lens_host=(), query_lens_host=(), in_graph=True
    )
    batch.page_table[2:] = case.num_pages
    batch.kv_slots[2:] = case.num_pages * case.spec.page_size
    backend = case.new_backend(TritonLatentBackend)
    write(backend, case.step)
    selected = select(backend, case.step, batch)
    assert selected is not None
    assert as_sets(selected)[0] == set(range(5))
    assert as_sets(selected)[2:] == [{0}, {0}]
    plain = eager.new_backend(TritonLatentBackend)
    write(plain, eager.step)
    expected = attend(plain, eager.step, select(plain, eager.step))
    out = attend(backend, case.step, selected, batch)
    torch.testing.assert_close(out[:2], expected[:2], rtol=1e-4, atol=1e-4)
    assert out.isfinite().all()


def test_rows_of_padding_behind_a_batch_are_zero() -> None:
    case = step_case(latent_spec(CPU), [40, 60], [1, 30], 1)
    backend = case.new_backend(TritonLatentBackend)
    write(backend, case.step)
    step = case.step
    padded = dataclasses.replace(step, **{
        name: torch.cat([getattr(step, name), torch.full_like(getattr(step, name)[:3], float("nan"))])
        for name in ("q_latent", "q_rope", "queries", "weights")
    })  # fmt: skip
    positions = torch.cat([step.batch.positions, torch.zeros(3, dtype=torch.int64)])
    padded = dataclasses.replace(
        padded,
        batch=dataclasses.replace(step.batch, positions=positions),
        turn=dataclasses.replace(step.turn, positions=positions),
    )
    selected = select(backend, padded)
    assert selected is not None
    assert (selected[31:] == -1).all()
    out = attend(backend, padded, selected)
    assert not out[31:].any()
    torch.testing.assert_close(out[:31], attend(backend, step, select(backend, step)))


def cuda_spec(**changes: object) -> LatentSpec:
    return dataclasses.replace(latent_spec(CPU), device=torch.device("cuda"), **changes)  # type: ignore[arg-type]


def test_it_names_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a CUDA device, not cpu" in str(TritonLatentBackend.unsupported(latent_spec(CPU)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert TritonLatentBackend.unsupported(cuda_spec()) is None
    assert "page size 48 is not a power of two" in str(TritonLatentBackend.unsupported(cuda_spec(page_size=48)))
    assert "float64" in str(TritonLatentBackend.unsupported(cuda_spec(dtype=torch.float64)))
    index = dataclasses.replace(latent_spec(CPU).index, fp8=True)  # type: ignore[type-var]
    for wants_fp8 in (cuda_spec(fp8=True), cuda_spec(index=index)):
        assert "8.9 or newer, this device has 8.6; take --kv-dtype model" in str(
            TritonLatentBackend.unsupported(wants_fp8)
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0 or newer, this device has 7.5" in str(TritonLatentBackend.unsupported(cuda_spec()))
    monkeypatch.setattr("benthic.attention.latent_triton.has_triton", lambda: False)
    assert "install benthic[gpu]" in str(TritonLatentBackend.unsupported(cuda_spec()))
