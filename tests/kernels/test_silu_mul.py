"""silu_mul: Triton and the reference against float64."""

import pytest
import torch

from benthic.kernels.silu_mul import silu_mul, silu_mul_reference
from benthic.kernels.silu_mul.kernel import silu_mul_triton
from tests.support.attention_cases import assert_close
from tests.support.triton_interpreter import DEVICE

RUNS = (silu_mul_triton, silu_mul_reference, silu_mul)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 40), (2, 2100), (70, 600), (0, 8)])
@pytest.mark.parametrize("run", RUNS)
def test_the_activation_is_right(run: object, tokens: int, width: int, dtype: torch.dtype) -> None:
    both = torch.randn(tokens, 2 * width + 3, device=DEVICE).to(dtype)[:, : 2 * width]  # strided rows
    gate, up = both.double().chunk(2, -1)
    out = run(both)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_close(out, torch.nn.functional.silu(gate) * up, dtype)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="silu_mul"):
        silu_mul(torch.zeros(2, 3))
