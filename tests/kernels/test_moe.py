"""moe_route and experts: Triton and the reference against a loop over tokens in float64."""

import math

import pytest
import torch

from benthic.kernels.experts import experts, experts_before_sum, experts_reference, sum_norm, sum_norm_reference
from benthic.kernels.experts.kernel import expert_parts, experts_triton, sort_pairs
from benthic.kernels.experts.summing.kernel import sum_norm_triton
from benthic.kernels.experts.tiles import ExpertPlan, ExpertTiles, plan_for
from benthic.kernels.moe_route import moe_route, moe_route_reference
from benthic.kernels.moe_route.kernel import moe_route_triton
from tests.support.attention_cases import assert_close
from tests.support.triton_interpreter import DEVICE

ROUTES = (moe_route_triton, moe_route_reference, moe_route)
BIG_TILES = ExpertPlan(32, ExpertTiles(32, 64, 16, 4, 2), ExpertTiles(32, 64, 16, 4, 2))


def choose(
    scores: list[float], bias: list[float], k: int, num_groups: int, topk_groups: int
) -> tuple[list[int], list[float]]:
    """Section by section what the kernel's docstring says, with Python's own sort."""
    z = [1 / (1 + math.exp(-s)) for s in scores]
    b = [x + y for x, y in zip(z, bias, strict=True)]
    size = len(b) // num_groups
    group_scores = [sum(sorted(b[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: (-group_scores[g], g))[:topk_groups]
    allowed = [e for e in range(len(b)) if e // size in kept]
    best = sorted(allowed, key=lambda e: (-b[e], e))[:k]
    return best, [z[e] for e in best]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "k", "num_groups", "topk_groups"),
    [(5, 16, 4, 4, 2), (3, 64, 8, 1, 1), (2, 12, 3, 3, 2), (4, 6, 2, 6, 4), (1, 1, 1, 1, 1), (2, 256, 8, 8, 4)],
)
@pytest.mark.parametrize(("norm", "shared"), [(True, False), (False, True)])
def test_route_agrees(
    route: object, tokens: int, num_experts: int, k: int, num_groups: int, topk_groups: int, norm: bool, shared: bool
) -> None:
    rng = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(tokens, num_experts + 3, generator=rng)[:, :num_experts].to(DEVICE)  # strided rows
    bias = torch.randn(num_experts, generator=rng).to(DEVICE)
    chosen, weights = route(
        logits, bias, k=k, num_groups=num_groups, topk_groups=topk_groups, norm=norm, scaling=2.5, shared=shared
    )
    assert chosen.dtype == torch.int32
    assert weights.dtype == torch.float32
    for t in range(tokens):
        best, z = choose(logits[t].tolist(), bias.tolist(), k, num_groups, topk_groups)
        assert chosen[t].tolist() == best + [num_experts] * shared
        total = sum(z) if norm else 1.0
        expected = [2.5 * w / total for w in z] + [1.0] * shared
        torch.testing.assert_close(weights[t].tolist(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_of_equal_scores_the_lowest_wins(route: object) -> None:
    logits = torch.zeros(1, 16, device=DEVICE)
    bias = torch.zeros(16, device=DEVICE)
    bias[5] = bias[13] = 0.25
    chosen, _ = route(logits, bias, k=4, num_groups=4, topk_groups=2, norm=True, scaling=1.0)
    assert chosen.tolist() == [[5, 13, 4, 6]]  # groups 1 and 3 are equal and best
    chosen, _ = route(logits, torch.zeros_like(bias), k=3, num_groups=4, topk_groups=1, norm=True, scaling=1.0)
    assert chosen.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("route", ROUTES)
def test_a_closed_group_stays_closed_though_its_scores_are_higher_than_negative_ones(route: object) -> None:
    bias = torch.tensor([-3.0, -3.0, -3.0, -9.0, -4.0, -4.0, -4.0, -4.0], device=DEVICE)
    logits = torch.zeros(1, 8, device=DEVICE)
    chosen, _ = route(logits, bias, k=4, num_groups=2, topk_groups=1, norm=False, scaling=1.0)
    assert chosen.tolist() == [[0, 1, 2, 3]]


def test_route_of_no_tokens_and_of_shapes_that_do_not_fit() -> None:
    logits, bias = torch.zeros(0, 8, device=DEVICE), torch.zeros(8, device=DEVICE)
    for route in ROUTES:
        chosen, weights = route(logits, bias, k=2, num_groups=1, topk_groups=1, norm=True, scaling=1.0, shared=True)
        assert chosen.shape == weights.shape == (0, 3)
    with pytest.raises(ValueError, match="moe_route"):
        moe_route(logits, bias, k=5, num_groups=4, topk_groups=2, norm=True, scaling=1.0)


def make_experts(
    tokens: int, k: int, num_experts: int, size: int, width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """x (strided rows), chosen, weights, gate_up, down."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, size + 8, generator=rng)[:, :size].to(dtype).to(DEVICE)
    chosen = torch.stack([torch.randperm(num_experts, generator=rng)[:k] for _ in range(tokens)]).int().to(DEVICE)
    weights = torch.rand(tokens, k, generator=rng).to(DEVICE)
    gate_up = (torch.randn(num_experts, 2 * width, size, generator=rng) * size**-0.5).to(dtype).to(DEVICE)
    down = (torch.randn(num_experts, size, width, generator=rng) * width**-0.5).to(dtype).to(DEVICE)
    return x, chosen, weights, gate_up, down


def expected_sum(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Token by token, in float64."""
    rows = []
    for t, picked in enumerate(chosen.tolist()):
        total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for j, e in enumerate(picked):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            total += weights[t, j].double() * (down[e].double() @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("run", [experts_triton, experts_reference, experts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "k", "num_experts", "size", "width"),
    [(1, 3, 5, 48, 24), (7, 2, 4, 40, 33), (40, 3, 6, 32, 16)],
)
def test_experts_agree(
    run: object, tokens: int, k: int, num_experts: int, size: int, width: int, dtype: torch.dtype
) -> None:
    case = make_experts(tokens, k, num_experts, size, width, dtype)
    assert_close(run(*case), expected_sum(*case), dtype)


@pytest.mark.parametrize("run", [experts_triton, experts_reference, experts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "k"), [(1, 3), (7, 2), (40, 4)])
@pytest.mark.parametrize("kept", [0.0, 0.4])
def test_pairs_of_no_expert_add_nothing(run: object, tokens: int, k: int, dtype: torch.dtype, kept: float) -> None:
    x, chosen, weights, gate_up, down = make_experts(tokens, k, 5, 48, 24, dtype)
    none = torch.rand(tokens, k, generator=torch.Generator().manual_seed(1)).to(DEVICE) >= kept
    everything = expected_sum(x, chosen, weights.masked_fill(none, 0), gate_up, down)
    out = torch.full((tokens, 48), torch.nan, device=DEVICE)  # float32 whatever x is: sums that are not rounded yet
    run(x, chosen.masked_fill(none, -1), weights, gate_up, down, out)
    assert_close(out, everything, dtype)
    assert not out[none.all(1)].any()


def test_experts_agree_with_every_token_at_one_expert_and_larger_tiles() -> None:
    x, chosen, weights, gate_up, down = make_experts(70, 1, 9, 40, 24, torch.float32)
    chosen.fill_(5)
    expected = expected_sum(x, chosen, weights, gate_up, down)
    out = torch.empty(70, 40, device=DEVICE)
    returned = experts_triton(x, chosen, weights, gate_up, down, out, plan=BIG_TILES)
    assert returned.data_ptr() == out.data_ptr()
    assert_close(out, expected, torch.float32)
    assert_close(experts(x, chosen, weights, gate_up, down, out), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [sum_norm_triton, sum_norm_reference, sum_norm])
def test_the_sum_of_experts_with_the_norm_behind_it(run: object, dtype: torch.dtype) -> None:
    x, chosen, weights, gate_up, down = make_experts(5, 3, 6, 40, 24, dtype)
    chosen[2, 1] = -1
    norm = (torch.rand(40) + 0.5).to(DEVICE, dtype)
    before = torch.randn(5, 40).to(DEVICE, dtype)
    residual = before.clone()
    normed = run(expert_parts(x, chosen, weights, gate_up, down), norm, 1e-5, residual)
    total = before.double() + experts_reference(x, chosen, weights, gate_up, down).double()
    assert_close(residual, total, dtype)
    assert_close(normed, total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double(), dtype)
    summed = experts_before_sum(x, chosen, weights, gate_up, down)
    assert isinstance(summed, torch.Tensor) == (DEVICE.type == "cpu")
    with pytest.raises(ValueError, match="sum_norm"):
        sum_norm(expert_parts(x, chosen, weights, gate_up, down), norm, 1e-5, residual[:4])


def test_experts_of_no_tokens_and_of_shapes_that_do_not_fit() -> None:
    x, chosen, weights, gate_up, down = make_experts(2, 2, 4, 16, 8, torch.float32)
    for run in (experts_triton, experts_reference, experts):
        assert run(x[:0], chosen[:0], weights[:0], gate_up, down).shape == (0, 16)
    with pytest.raises(ValueError, match="experts"):
        experts(x, chosen, weights, gate_up[:, :8], down)


@pytest.mark.parametrize(("tokens", "k", "num_experts", "rows"), [(3, 2, 40, 16), (50, 4, 7, 16), (700, 8, 9, 32)])
def test_sorting_covers_each_pair_once(tokens: int, k: int, num_experts: int, rows: int) -> None:
    chosen = make_experts(tokens, k, num_experts, 1, 1, torch.float32)[1]
    order, inverse, items, ends = sort_pairs(chosen, num_experts, rows)
    flat = chosen.flatten()
    assert order.tolist() == flat.argsort(stable=True).tolist()
    assert order[inverse.long()].tolist() == list(range(tokens * k))
    assert ends.tolist() == flat.long().bincount(minlength=num_experts).cumsum(0).tolist()
    covered = []
    for expert, first, count in items.tolist():
        assert count <= rows
        mine = order[first : first + count].long()
        assert (flat[mine] == expert).all()
        covered += mine.tolist()
    assert covered == order.tolist()
    full = sum(-(-n // rows) for n in flat.long().bincount().tolist())
    assert all(count == 0 for *_, count in items.tolist()[full:])


@pytest.mark.parametrize(("tokens", "k", "rows"), [(3, 2, 16), (50, 4, 16), (1100, 8, 32)])
def test_sorting_leaves_out_pairs_of_no_expert(tokens: int, k: int, rows: int) -> None:
    chosen = make_experts(tokens, k, 20, 1, 1, torch.float32)[1] - 13  # 7 experts of 20
    chosen = chosen.clamp(min=-1).contiguous()
    order, inverse, items, ends = sort_pairs(chosen, 7, rows)
    flat = chosen.flatten()
    none = int((flat < 0).sum())
    expected = flat.argsort(stable=True).tolist()[none:]
    assert order.tolist() == expected + [0] * none
    assert (inverse[flat < 0] == -1).all()
    assert order[inverse[flat >= 0].long()].tolist() == (flat >= 0).nonzero().flatten().tolist()
    assert ends[-1] == items[:, 2].sum() == len(flat) - none


def test_the_table_has_a_plan_for_every_size() -> None:
    rows = [plan_for(tokens, 8, 64, torch.bfloat16).rows for tokens in (1, 16, 64, 512, 8192)]
    assert rows == sorted(rows)
    assert plan_for(8192, 8, 64, torch.float32).rows == 32
