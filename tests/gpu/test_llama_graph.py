"""A decode step of the model captured in a CUDA graph, and its logits on a GPU against the stored reference."""

from pathlib import Path

import pytest
import torch

from benthic.forward import ForwardBatch
from benthic.models.registry import load_model
from benthic.weights.checkpoint import SafetensorsReader
from benthic.weights.locate import locate
from tests.support.model_driver import ModelDriver

FOLDER = Path(__file__).parents[1] / "data" / "oracles" / "llama"
CUDA = torch.device("cuda")

pytestmark = pytest.mark.gpu


def reference(tmp_path: Path) -> SafetensorsReader:
    (tmp_path / "model.safetensors").symlink_to(FOLDER / "reference.safetensors")
    return SafetensorsReader(tmp_path)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_logits_equal_the_reference(backend: str, tmp_path: Path) -> None:
    model = load_model(locate(str(FOLDER)), CUDA, torch.float32)
    oracle = reference(tmp_path)
    for prompt in range(4):
        driver = ModelDriver(model, backend=backend)
        expected = oracle.load(f"prompt{prompt}.logits").cuda()
        logits = driver.prefill(oracle.load(f"prompt{prompt}.tokens").tolist(), chunk=32)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3 * expected.abs().max().item())
        for token, row in zip(
            oracle.load(f"prompt{prompt}.greedy_tokens").tolist(),
            oracle.load(f"prompt{prompt}.greedy_logits")[1:].cuda(),
            strict=False,
        ):
            torch.testing.assert_close(
                driver.step({0: token}, {})[0], row, rtol=0, atol=1e-3 * expected.abs().max().item()
            )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_captured_decode_step_equals_an_eager_one(backend: str) -> None:
    """Two real rows and two padded ones; the graph is captured on padding alone and replayed on real tokens."""
    dtype = torch.bfloat16
    model = load_model(locate(str(FOLDER)), CUDA, dtype)
    eager, graphed = (ModelDriver(model, rows=2, backend=backend) for _ in range(2))
    for driver in (eager, graphed):
        driver.step({}, {0: list(range(40)), 1: list(range(7))})
    scratch, size = graphed.pools["target_kv"].shape[1] - 1, graphed.page_size
    table = torch.full((4, graphed.table.shape[1]), 0, dtype=torch.int32, device=CUDA)
    table[:, 0] = scratch
    batch = ForwardBatch(
        num_tokens=4,
        num_decode=4,
        max_seq_len=graphed.spec.max_seq_len,
        max_query_len=0,
        input_ids=torch.zeros(4, dtype=torch.int64, device=CUDA),
        positions=torch.zeros(4, dtype=torch.int64, device=CUDA),
        kv_slots=torch.full((4,), scratch * size, device=CUDA),
        seq_lens=torch.ones(4, dtype=torch.int32, device=CUDA),
        page_table=table,
        cu_query_lens=torch.zeros(1, dtype=torch.int32, device=CUDA),
        in_graph=True,
    )

    def forward() -> torch.Tensor:
        return model.logits(model(batch, graphed.attention, graphed.attention.begin(batch)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = forward()
    for step in range(12):
        expected = eager.step({0: 5 + step, 1: 90 + step}, {})
        lens = torch.tensor([40 + step, 7 + step])
        batch.input_ids[:2] = torch.tensor([5 + step, 90 + step]).cuda()
        batch.positions[:2] = lens.cuda()
        batch.seq_lens[:2] = (lens + 1).to(torch.int32).cuda()
        batch.page_table[:2] = graphed.table.cuda()
        batch.kv_slots[:2] = (graphed.table[torch.arange(2), lens // size].long() * size + lens % size).cuda()
        graph.replay()
        torch.testing.assert_close(logits[:2], expected, rtol=0, atol=0.05 * expected.abs().max().item())
