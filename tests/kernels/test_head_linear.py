"""head_linear: Triton and the reference against float64."""

from collections.abc import Callable

import pytest
import torch

from benthic.kernels.head_linear import head_linear, head_linear_reference
from benthic.kernels.head_linear.kernel import head_linear_triton
from tests.support.attention_cases import assert_close
from tests.support.triton_interpreter import DEVICE

RUNS = (head_linear_triton, head_linear_reference, head_linear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(3, 24, 40), (2, 128, 512), (2, 512, 33)])
@pytest.mark.parametrize("run", RUNS)
def test_products_are_right(
    run: Callable[..., torch.Tensor], heads: int, inputs: int, outputs: int, tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn(tokens, heads, inputs + 8, device=DEVICE).to(dtype)[..., :inputs]
    weight = (torch.randn(heads, inputs, outputs, device=DEVICE) * inputs**-0.5).to(dtype)
    out = run(x, weight)
    expected = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    assert out.dtype == dtype
    assert_close(out, expected, dtype)
    given = torch.full((tokens, heads, outputs), float("nan"), dtype=dtype, device=DEVICE)
    assert run(x, weight, given) is given
    assert_close(given, expected, dtype)


def test_shapes_that_do_not_fit() -> None:
    x, weight = torch.zeros(2, 3, 8), torch.zeros(3, 8, 4)
    for wrong in (x[:, :2], x[..., :7], x.half(), x[0]):
        with pytest.raises(ValueError, match="head_linear"):
            head_linear(wrong, weight)
    with pytest.raises(ValueError, match="head_linear"):
        head_linear(x, weight, torch.zeros(2, 3, 5))
