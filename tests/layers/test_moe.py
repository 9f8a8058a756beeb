"""Routing, experts and the shared expert together, against the sum spelt out."""

import pytest
import torch

from benthic.layers.linear import Linear
from benthic.layers.mlp import GatedMLP
from benthic.layers.moe import MoE
from benthic.weights.dsa_config import MoEConfig
from tests.support.rank_batches import moe_batch

HIDDEN, WIDE, EXPERTS = 12, 10, 8
CONFIG = MoEConfig(
    num_experts=EXPERTS, num_experts_per_token=3, intermediate_size=WIDE, num_shared_experts=1, num_groups=4,
    topk_groups=2, norm_topk=True, routed_scaling=2.5, layers=(True,),
)  # fmt: skip


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("in_stack", [False, True])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_sum_of_the_best_experts_and_the_shared_one(tokens: int, in_stack: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    router = torch.randn(EXPERTS, HIDDEN, generator=rng)
    bias = torch.randn(EXPERTS, generator=rng) - 2  # also negative: closed groups must lose to them
    gate_up = torch.randn(EXPERTS + 1, 2 * WIDE, HIDDEN, generator=rng)
    down = torch.randn(EXPERTS + 1, HIDDEN, WIDE, generator=rng)
    x = torch.randn(tokens, HIDDEN, generator=rng)
    if in_stack:
        layer = MoE(CONFIG, router, bias, gate_up, down, None)
    else:
        layer = MoE(CONFIG, router, bias, gate_up[:-1], down[:-1], GatedMLP(Linear(gate_up[-1]), Linear(down[-1])))
    out = layer(x, moe_batch(None))
    for token in range(tokens):
        scores = (router.double() @ x[token].double()).sigmoid()
        biased = scores + bias.double()
        groups = [biased[2 * g : 2 * g + 2].sum().item() for g in range(4)]  # two experts each
        opened = sorted(range(4), key=lambda g: -groups[g])[:2]
        best = sorted((e for e in range(EXPERTS) if e // 2 in opened), key=lambda e: -biased[e].item())[:3]
        expected = mlp(x[token].double(), gate_up[-1].double(), down[-1].double())
        for expert in best:
            share = 2.5 * scores[expert] / scores[best].sum()
            expected = expected + share * mlp(x[token].double(), gate_up[expert].double(), down[expert].double())
        torch.testing.assert_close(out[token].double(), expected, rtol=1e-4, atol=1e-4)
