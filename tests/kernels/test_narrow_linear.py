"""narrow_linear: Triton and the reference against float64."""

import pytest
import torch

from benthic.kernels.narrow_linear import kernel, narrow_linear, narrow_linear_reference
from benthic.kernels.narrow_linear.kernel import narrow_linear_triton
from tests.support.triton_interpreter import DEVICE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("x_type", "weight_type"), [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32)])
@pytest.mark.parametrize(("tokens", "outputs", "size"), [(1, 1, 16), (5, 33, 100), (70, 70, 48)])
@pytest.mark.parametrize("run", [narrow_linear_triton, narrow_linear_reference, narrow_linear])
def test_sums_are_float32(
    run: object,
    tokens: int,
    outputs: int,
    size: int,
    x_type: torch.dtype,
    weight_type: torch.dtype,
    few: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "FEW_PRODUCTS", 1 << 40 if few else 0)
    x = torch.randn(tokens, size + 5, device=DEVICE).to(x_type)[:, :size]  # strided rows
    weight = torch.randn(outputs, size, device=DEVICE).to(weight_type)
    out = run(x, weight, 0.5)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T / 2, rtol=1e-5, atol=1e-4)


def test_no_tokens_and_shapes_that_do_not_fit() -> None:
    weight = torch.zeros(3, 8, device=DEVICE)
    for run in (narrow_linear_triton, narrow_linear_reference, narrow_linear):
        assert run(torch.zeros(0, 8, device=DEVICE), weight).shape == (0, 3)
    with pytest.raises(ValueError, match="narrow_linear"):
        narrow_linear(torch.zeros(2, 8), torch.zeros(257, 8))
