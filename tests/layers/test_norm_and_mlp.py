"""The norm and the feed-forward block against their formulas."""

import pytest
import torch
import torch.nn.functional as F

from benthic.layers.linear import Linear
from benthic.layers.mlp import GatedMLP
from benthic.layers.norm import RMSNorm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1.6e-2)])
def test_norm_with_and_without_a_residual(dtype: torch.dtype, tolerance: float, device: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(7, 40, generator=rng).mul(3).to(dtype).to(device) for _ in range(2))
    weight = torch.randn(40, generator=rng).to(dtype).to(device)
    norm = RMSNorm(weight, 1e-5)

    def formula(value: torch.Tensor) -> torch.Tensor:
        wide = value.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    torch.testing.assert_close(norm(x).double(), formula(x), atol=tolerance, rtol=tolerance)
    before = residual.clone()
    normed = norm.after_add(x, residual)
    assert torch.equal(residual, before + x)
    torch.testing.assert_close(normed.double(), formula(before + x), atol=tolerance, rtol=tolerance)


def test_gated_mlp() -> None:
    rng = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(size, generator=rng) for size in ((12, 8), (12, 8), (8, 12)))
    x = torch.randn(5, 8, generator=rng)
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(GatedMLP(Linear(torch.cat((gate, up))), Linear(down))(x), expected, atol=1e-4, rtol=1e-4)
