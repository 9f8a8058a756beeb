"""norm_products: Triton and the reference against float64."""

from collections.abc import Callable

import pytest
import torch

from benthic.kernels.norm_products import MOST_TOKENS, NormProducts, norm_products, norm_products_reference
from benthic.kernels.norm_products.kernel import norm_products_triton
from tests.support.attention_cases import assert_close
from tests.support.triton_interpreter import DEVICE

RUNS = (norm_products_triton, norm_products_reference, norm_products)
EPS, FACTOR = 1e-5, 0.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "wide", "few", "size"),
    [(1, 5, 3, 48), (1, 7, 0, 100), (1, 0, 9, 1024), (2, 0, 4, 48), (5, 0, 7, 100), (0, 0, 3, 16)],
)
@pytest.mark.parametrize("run", RUNS)
def test_a_norm_and_its_products(
    run: Callable[..., NormProducts], tokens: int, wide: int, few: int, size: int, dtype: torch.dtype
) -> None:
    added, residual = torch.randn(2, tokens, size, device=DEVICE).to(dtype)
    norm = (torch.rand(size, device=DEVICE) + 0.5).to(dtype)
    weight, narrow = (
        (torch.randn(n, size + 3, device=DEVICE) * size**-0.5).to(dtype)[:, :size] if n else None for n in (wide, few)
    )
    before = added.clone(), residual.clone()
    result = run(added, residual, norm, EPS, weight, narrow, FACTOR)
    assert torch.equal(added, before[0])
    assert torch.equal(residual, before[1])
    assert_close(result.residual, added.double() + residual.double(), dtype)
    total = result.residual.double()
    normed = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    assert_close(result.normed, normed, dtype)
    assert (result.product is None) == (weight is None)
    assert (result.narrow is None) == (narrow is None)
    if weight is not None and result.product is not None:
        assert result.product.dtype == dtype
        assert_close(result.product, result.normed.double() @ weight.double().T, dtype)
    if narrow is not None and result.narrow is not None:
        assert result.narrow.dtype == torch.float32
        assert_close(result.narrow, result.normed.double() @ narrow.double().T * FACTOR, torch.float32)


def test_shapes_that_do_not_fit() -> None:
    row, norm, weight = torch.zeros(1, 8), torch.zeros(8), torch.zeros(3, 8)
    for added, residual, matrix in (
        (row, torch.zeros(2, 8), weight),
        (torch.zeros(1, 7), torch.zeros(1, 7), weight),
        (row, row, torch.zeros(3, 7)),
        (row, row, weight.half()),
        (row, row, None),
        (torch.zeros(2, 8), torch.zeros(2, 8), weight),
    ):
        with pytest.raises(ValueError, match="norm_products"):
            norm_products(added, residual, norm, EPS, matrix, None)
    many = torch.zeros(MOST_TOKENS + 1, 8)
    with pytest.raises(ValueError, match="norm_products"):
        norm_products(many, many, norm, EPS, None, weight)
