"""The router's and the experts' kernels, compiled, at real sizes."""

import pytest
import torch

from benthic.kernels.experts import experts, experts_reference
from benthic.kernels.experts.kernel import experts_triton, sort_pairs
from benthic.kernels.experts.tiles import plan_for
from benthic.kernels.moe_route import moe_route, moe_route_reference
from benthic.kernels.narrow_linear import narrow_linear
from benthic.kernels.row_linear import row_linear
from benthic.kernels.silu_mul import silu_mul, silu_mul_reference

pytestmark = pytest.mark.gpu
NUM_EXPERTS, K, SIZE, WIDTH = 17, 5, 2048, 1024
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest result

Weights = tuple[torch.Tensor, torch.Tensor]


def stacked(dtype: torch.dtype, device: torch.device) -> Weights:
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, SIZE, device=device) * SIZE**-0.5
    down = torch.randn(NUM_EXPERTS, SIZE, WIDTH, device=device) * WIDTH**-0.5
    return gate_up.to(dtype), down.to(dtype)


def routed(tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, experts and weights with a shared expert that every token takes."""
    x = torch.randn(tokens, SIZE, device=device).to(dtype)
    logits, bias = torch.randn(tokens, NUM_EXPERTS - 1, device=device), torch.zeros(NUM_EXPERTS - 1, device=device)
    chosen, weights = moe_route(logits, bias, k=K - 1, num_groups=1, topk_groups=1, norm=True, scaling=2.5, shared=True)
    return x, chosen, weights


def assert_agrees(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (out.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= TOLERANCE[dtype], f"off by {error:.2e} of the largest"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 200, 1000])
def test_experts(tokens: int, dtype: torch.dtype, cuda: torch.device) -> None:
    gate_up, down = stacked(dtype, cuda)
    x, chosen, weights = routed(tokens, dtype, cuda)
    expected = experts_reference(x.float(), chosen, weights, gate_up.float(), down.float())
    assert_agrees(experts(x, chosen, weights, gate_up, down), expected, dtype)


def test_experts_of_a_long_chunk_with_every_plan(cuda: torch.device) -> None:
    gate_up, down = stacked(torch.bfloat16, cuda)
    x, chosen, weights = routed(8192, torch.bfloat16, cuda)
    expected = experts_reference(x, chosen, weights, gate_up, down)
    for tokens in (16, 64, 300, 8192):  # whichever plan: the result may not depend on it
        plan = plan_for(tokens, K, NUM_EXPERTS, torch.bfloat16)
        assert_agrees(experts_triton(x, chosen, weights, gate_up, down, plan=plan), expected, torch.bfloat16)
    for skewed in (torch.zeros_like(chosen[:, :1]), torch.full_like(chosen[:, :1], NUM_EXPERTS - 1)):
        ones = torch.ones_like(weights[:, :1])
        expected = experts_reference(x, skewed, ones, gate_up, down)
        assert_agrees(experts(x, skewed, ones, gate_up, down), expected, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_experts_in_a_graph_follow_their_inputs(tokens: int, cuda: torch.device) -> None:
    gate_up, down = stacked(torch.bfloat16, cuda)
    x, chosen, weights = routed(tokens, torch.bfloat16, cuda)
    out = torch.empty_like(x)
    experts(x, chosen, weights, gate_up, down, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(x, chosen, weights, gate_up, down, out)
    for _ in range(3):
        for held, fresh in zip((x, chosen, weights), routed(tokens, torch.bfloat16, cuda), strict=True):
            held.copy_(fresh)
        graph.replay()
        first = out.clone()
        assert_agrees(first, experts_reference(x, chosen, weights, gate_up, down), torch.bfloat16)
        graph.replay()
        assert torch.equal(out, first), "the sum's order is not fixed"


@pytest.mark.parametrize(("tokens", "k"), [(2, 8), (64, 9), (500, 9), (3001, 8)])
def test_sorting(tokens: int, k: int, cuda: torch.device) -> None:
    chosen = torch.stack([torch.randperm(257)[:k] for _ in range(tokens)]).int().to(cuda)
    order, inverse, items, ends = sort_pairs(chosen, 257, 16)
    flat = chosen.flatten().long()
    assert torch.equal(order.long(), flat.argsort(stable=True))
    assert torch.equal(order[inverse.long()].long(), torch.arange(tokens * k, device=cuda))
    assert torch.equal(ends.long(), flat.bincount(minlength=257).cumsum(0))
    assert items[:, 2].sum() == tokens * k
    assert items[:, 2].max() <= 16


@pytest.mark.parametrize("tokens", [1, 33, 8192])
@pytest.mark.parametrize(("num_experts", "num_groups", "topk_groups"), [(64, 1, 1), (256, 8, 4), (256, 1, 1)])
def test_route(tokens: int, num_experts: int, num_groups: int, topk_groups: int, cuda: torch.device) -> None:
    logits = torch.randn(tokens, num_experts, device=cuda)
    logits[:, 3::7] = logits[:, 2::7][:, : logits[:, 3::7].shape[1]]  # ties
    bias = torch.zeros(num_experts, device=cuda)
    shape = {"k": 8, "num_groups": num_groups, "topk_groups": topk_groups, "norm": True, "scaling": 2.5}
    chosen, weights = moe_route(logits, bias, **shape, shared=True)
    expected, expected_weights = moe_route_reference(logits, bias, **shape, shared=True)
    same = (chosen == expected).all(1)  # where two sigmoids are an ulp apart the device's may say otherwise
    assert same.float().mean() > 0.995
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 2000])
@pytest.mark.parametrize(("outputs", "size"), [(32, 2048), (256, 6144)])
def test_narrow_linear(outputs: int, size: int, tokens: int, dtype: torch.dtype, cuda: torch.device) -> None:
    x = torch.randn(tokens, size + 8, device=cuda).to(dtype)[:, :size]
    weight = torch.randn(outputs, size, device=cuda).to(dtype)
    expected = x.double() @ weight.double().T
    out = narrow_linear(x, weight)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4 * size**0.5)
    assert torch.equal(narrow_linear(x, weight), out)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("outputs", "size"), [(1728, 2048), (10240, 1024), (2048, 4096), (333, 1000)])
def test_row_linear(outputs: int, size: int, dtype: torch.dtype, cuda: torch.device) -> None:
    x = torch.randn(1, size + 8, device=cuda).to(dtype)[:, :size]
    weight = (torch.randn(outputs, size, device=cuda) * size**-0.5).to(dtype)
    out = row_linear(x, weight)
    assert out.dtype == dtype
    assert_agrees(out, x.double() @ weight.double().T, dtype)
    assert torch.equal(row_linear(x, weight), out)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "width"), [(1, 8192), (64, 33), (8192, 1024)])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype, cuda: torch.device) -> None:
    both = torch.randn(tokens, 2 * width, device=cuda).to(dtype)
    assert_agrees(silu_mul(both), silu_mul_reference(both), dtype)
