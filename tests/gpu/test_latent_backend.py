"""The latent backend's kernels together, on a real GPU: beside the torch backend, and in CUDA graphs."""

import dataclasses

import pytest
import torch

from benthic.attention.latent import LatentBackend
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.attention.latent_triton import TritonLatentBackend
from benthic.forward import ForwardBatch
from tests.support.latent_steps import Drawn, StepCase, attend, latent_spec, select, step_case, turned, write

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
SHAPES = {  # GLM-5's, and small ones with odd head counts
    "glm": {
        "heads": 32,
        "rank": 512,
        "rope_dim": 64,
        "index_heads": 32,
        "index_dim": 128,
        "page_size": 64,
        "topk": 2048,
    },
    "small": {"heads": 5, "rank": 128, "rope_dim": 32, "index_heads": 3, "index_dim": 64, "page_size": 16, "topk": 256},
}
ROWS = [  # decode rows, contexts as parts of K, new tokens
    (3, [0.1, 1.0, 1.4], [1, 1, 1]),
    (2, [1.2, 0.3, 1.5, 0.5], [1, 1, 300, 100]),
    (0, [1.5], [-1]),  # a whole prompt: dense up to K, sparse behind
]


def make_case(device: torch.device, shape: str, rows: int, dtype: torch.dtype, fp8: bool, index_fp8: bool) -> StepCase:
    sizes = SHAPES[shape]
    spec = latent_spec(device, dtype=dtype, fp8=fp8, index_fp8=index_fp8, max_seq_len=4096, **sizes)  # type: ignore[arg-type]
    num_decode, contexts, new = ROWS[rows]
    lens = [int(part * sizes["topk"]) for part in contexts]
    fresh = [length if count < 0 else min(count, length) for count, length in zip(new, lens, strict=True)]
    return step_case(spec, lens, fresh, num_decode)


def overlap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The least share of a row's expected positions that were found."""
    shares = []
    for one, other in zip(found.tolist(), expected.tolist(), strict=True):
        chosen, wanted = {p for p in one if p >= 0}, {p for p in other if p >= 0}
        assert len(chosen) == len(wanted) == sum(p >= 0 for p in one)
        shares.append(len(chosen & wanted) / len(wanted))
    return min(shares)


@pytest.mark.parametrize(("fp8", "index_fp8"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", range(len(ROWS)))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_it_agrees_with_the_torch_backend(
    shape: str, rows: int, dtype: torch.dtype, fp8: bool, index_fp8: bool, cuda: torch.device
) -> None:
    case = make_case(cuda, shape, rows, dtype, fp8, index_fp8)
    ours, reference = case.new_backend(TritonLatentBackend), case.new_backend(TorchLatentBackend)
    for backend in (ours, reference):
        write(backend, case.step)
    if not fp8:
        torch.testing.assert_close(ours.latents, reference.latents, rtol=2e-2, atol=TOLERANCE[dtype])
    selected, expected = select(ours, case.step), select(reference, case.step)
    assert (selected is None) == (expected is None)
    if selected is not None and expected is not None:
        # a few of the last places go to others where scores are rounded otherwise
        assert overlap(selected, expected) >= (0.99 if dtype == torch.float32 and not index_fp8 else 0.95)
    out, wanted = attend(ours, case.step, selected), attend(reference, case.step, selected)
    torch.testing.assert_close(out, wanted, rtol=3e-2, atol=TOLERANCE[dtype])


def forward(backend: LatentBackend, drawn: Drawn, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes, selection and attention of a decode step."""
    write(backend, drawn)
    metadata = backend.begin(batch)
    assert backend.needs_selection(metadata)
    selected = backend.select(0, *turned(backend, drawn), batch, metadata)
    return selected, backend.attend(1, drawn.q_latent, drawn.q_rope, selected, batch, metadata)


@pytest.mark.parametrize("backend", [TritonLatentBackend, TorchLatentBackend])
@pytest.mark.parametrize(("fp8", "index_fp8"), [(False, False), (True, True)])
def test_a_captured_step_equals_an_eager_one_at_other_lengths(
    fp8: bool, index_fp8: bool, backend: type[LatentBackend], cuda: torch.device
) -> None:
    """Captured with every row in the scratch page, replayed on rows on both sides of K, and on padding."""
    spec = latent_spec(cuda, dtype=torch.bfloat16, fp8=fp8, index_fp8=index_fp8, max_seq_len=4096, **SHAPES["small"])  # type: ignore[arg-type]
    case = step_case(spec, [100, 256, 257, 2000, 1, 1], [1] * 6, 6)
    step, scratch = case.step, case.num_pages
    real = step.batch
    for tensor, value in ((real.page_table[4:], scratch), (real.kv_slots[4:], scratch * spec.page_size)):
        tensor.fill_(value)
    expected_on = case.new_backend(backend)
    selected, expected = forward(expected_on, step, real)

    static = dataclasses.replace(
        real,
        max_seq_len=spec.max_seq_len,
        positions=torch.zeros_like(real.positions),
        kv_slots=torch.full_like(real.kv_slots, scratch * spec.page_size),
        seq_lens=torch.ones_like(real.seq_lens),
        page_table=torch.full((6, spec.max_seq_len // spec.page_size), scratch, dtype=torch.int32, device=cuda),
        query_lens_host=(),
        seq_lens_host=(),
        in_graph=True,
    )
    drawn = dataclasses.replace(step, batch=static, turn=dataclasses.replace(step.turn, positions=static.positions))
    captured_on = case.new_backend(backend)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward(captured_on, drawn, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, out = forward(captured_on, drawn, static)
    for tensor, value in (
        (static.positions, real.positions), (static.kv_slots, real.kv_slots), (static.seq_lens, real.seq_lens),
        (static.page_table[:, : real.page_table.shape[1]], real.page_table),
    ):  # fmt: skip
        tensor.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert overlap(found[:4], selected[:4]) >= 0.99
    torch.testing.assert_close(out[:4], expected[:4], rtol=2e-2, atol=2e-2)
    assert out.isfinite().all()


def test_the_memory_of_scores_does_not_grow_with_the_context(cuda: torch.device) -> None:
    """2,048 tokens at the end of 32k and of 128k: all their scores at once would be a GiB there."""
    spec = latent_spec(cuda, dtype=torch.bfloat16, index_fp8=True, max_seq_len=1 << 17, **SHAPES["small"])  # type: ignore[arg-type]
    case = step_case(dataclasses.replace(spec, num_layers=1), [4096], [2048], 0)
    backend = case.new_backend(TritonLatentBackend)
    peaks = []
    for length in (1 << 15, 1 << 17):
        pages = torch.zeros(1, length // spec.page_size, dtype=torch.int32, device=cuda)
        batch = dataclasses.replace(
            case.step.batch,
            positions=torch.arange(length - 2048, length, device=cuda),
            seq_lens=torch.tensor([length], dtype=torch.int32, device=cuda),
            seq_lens_host=(length,),
            max_seq_len=length,
            page_table=pages,
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert select(backend, case.step, batch) is not None
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert max(peaks) < 320 << 20
    assert 3 * max(peaks) < 4 * 2048 * (1 << 17)
