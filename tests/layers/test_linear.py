"""Packed products equal plain ones."""

import pytest
import torch
import torch.nn.functional as F

from benthic.layers.linear import Linear, can_pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 200])
def test_products_equal_plain_ones(dtype: torch.dtype, bias: bool, rows: int) -> None:
    rng = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(48, 31, generator=rng).to(dtype), torch.randn(rows, 31, generator=rng).to(dtype)
    added = torch.randn(48, generator=rng).to(dtype) if bias else None
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    result = Linear(weight, added)(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=tolerance * 6, rtol=tolerance)


def test_no_rows_and_strided_rows() -> None:
    weight, x = torch.randn(5, 4), torch.randn(6, 9)[::2, 1:5]
    linear = Linear(weight)
    assert linear(x[:0]).shape == (0, 5)
    torch.testing.assert_close(linear(x), x @ weight.T, atol=1e-5, rtol=1e-5)


def test_other_types_are_not_packed() -> None:
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float16))
    assert not can_pack(torch.zeros(4, 4, device="meta"))
