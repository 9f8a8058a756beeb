"""row_linear: Triton and the reference against float64."""

from collections.abc import Callable

import pytest
import torch

from benthic.kernels.row_linear import row_linear, row_linear_reference
from benthic.kernels.row_linear.kernel import row_linear_triton
from tests.support.attention_cases import assert_close
from tests.support.triton_interpreter import DEVICE

RUNS = (row_linear_triton, row_linear_reference, row_linear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "size"), [(1, 16), (33, 100), (70, 2048)])
@pytest.mark.parametrize("run", RUNS)
def test_products_are_right(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    outputs: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(3, size + 5, device=DEVICE).to(dtype)[1:2, :size]
    weight = (torch.randn(outputs, size, device=DEVICE) * size**-0.5).to(dtype)
    out = run(x, weight)
    assert out.dtype == dtype
    assert_close(out, x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize("x", [torch.zeros(2, 8), torch.zeros(1, 7), torch.zeros(1, 8, dtype=torch.float16)])
def test_shapes_that_do_not_fit(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="row_linear"):
        row_linear(x, torch.zeros(3, 8))
