"""The router's and the experts' kernels, compiled, at real sizes."""

import sys

import pytest
import torch

from benthic.kernels import pdl
from benthic.kernels.experts import ExpertParts, experts, experts_before_sum, experts_reference, sum_norm
from benthic.kernels.experts.kernel import experts_triton, sort_pairs
from benthic.kernels.experts.tiles import plan_for
from benthic.kernels.head_linear import head_linear
from benthic.kernels.moe_route import moe_route, moe_route_reference
from benthic.kernels.narrow_linear import narrow_linear
from benthic.kernels.norm_products import norm_products, norm_products_reference
from benthic.kernels.rms_norm import rms_norm
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


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [2, 64, 1000])
def test_the_sum_with_the_norm_is_what_both_make(tokens: int, dtype: torch.dtype, cuda: torch.device) -> None:
    gate_up, down = stacked(dtype, cuda)
    x, chosen, weights = routed(tokens, dtype, cuda)
    norm, residual = torch.rand(SIZE, device=cuda).to(dtype), torch.randn(tokens, SIZE, device=cuda).to(dtype)
    other = residual.clone()
    expected = rms_norm(experts(x, chosen, weights, gate_up, down), norm, 1e-5, other)
    parts = experts_before_sum(x, chosen, weights, gate_up, down)
    assert isinstance(parts, ExpertParts)
    # in float16 an element in a million is the next number: two kernels' products and sums are joined differently
    near = {"rtol": 2e-3, "atol": 1e-3} if dtype == torch.float16 else {}
    torch.testing.assert_close(sum_norm(parts, norm, 1e-5, residual), expected, **near)
    torch.testing.assert_close(residual, other, **(near or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 512), (512, 128), (192, 200)])
def test_head_linear(inputs: int, outputs: int, tokens: int, dtype: torch.dtype, cuda: torch.device) -> None:
    x = torch.randn(tokens, 32, inputs + 64, device=cuda).to(dtype)[..., :inputs]
    weight = (torch.randn(32, inputs, outputs, device=cuda) * inputs**-0.5).to(dtype)
    assert_agrees(head_linear(x, weight), torch.einsum("thk,hkn->thn", x.double(), weight.double()), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [2048, 7168])
@pytest.mark.parametrize(("tokens", "wide", "few"), [(1, 1730, 33), (1, 70, 0), (1, 0, 64), (2, 0, 64), (32, 0, 250)])
def test_norm_products(tokens: int, wide: int, few: int, size: int, dtype: torch.dtype, cuda: torch.device) -> None:
    added, residual = torch.randn(2, tokens, size, device=cuda).to(dtype)
    norm = torch.rand(size, device=cuda).to(dtype)
    weight, narrow = ((torch.randn(n, size, device=cuda) * size**-0.5).to(dtype) if n else None for n in (wide, few))
    expected = norm_products_reference(added, residual, norm, 1e-5, weight, narrow, 0.5)
    result = norm_products(added, residual, norm, 1e-5, weight, narrow, 0.5)
    assert torch.equal(result.residual, expected.residual)
    for got, wanted in zip(result, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert_agrees(got, wanted, dtype)


@pytest.mark.parametrize("tokens", [1, 2, 32])
def test_kernels_brought_up_early_have_the_same_bits(
    tokens: int, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = stacked(torch.bfloat16, cuda)
    added, start = torch.randn(2, tokens, SIZE, device=cuda).to(torch.bfloat16)
    router = (torch.randn(NUM_EXPERTS - 1, SIZE, device=cuda) * SIZE**-0.5).to(torch.bfloat16)
    norm, bias = torch.rand(SIZE, device=cuda).to(torch.bfloat16), torch.zeros(NUM_EXPERTS - 1, device=cuda)
    route = {"k": K - 1, "num_groups": 1, "topk_groups": 1, "norm": True, "scaling": 2.5, "shared": True}

    def replayed() -> torch.Tensor:
        def layers() -> torch.Tensor:
            x, residual = added, start
            for _ in range(4):
                _, residual, _, logits = norm_products(x, residual, norm, 1e-5, None, router)
                x = experts(residual, *moe_route(logits, bias, **route), gate_up, down)  # type: ignore[arg-type]
            return x

        layers()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers()
        for _ in range(3):
            graph.replay()
        return out.clone()

    early = replayed()
    for name, module in list(sys.modules.items()):
        if name.startswith("benthic.kernels.") and getattr(module, "pdl", None) is pdl.pdl:
            monkeypatch.setattr(module, "pdl", lambda device: {"PDL": False})
    assert torch.equal(early, replayed())
