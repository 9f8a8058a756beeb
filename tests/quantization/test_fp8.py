"""fp8 in blocks against the double loop that the format's description is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.quantization import dequantise_fp8, quantise_fp8
from benthic.quantization.fp8 import scale_shape

SIZES = st.one_of(st.integers(1, 20), st.integers(120, 140), st.integers(250, 300))


def by_loops(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    values = weight.float()
    for n in range(weight.shape[0]):
        for block in range(scale_inv.shape[1]):
            columns = slice(block * 128, (block + 1) * 128)
            values[n, columns] *= scale_inv[n // 128, block]
    return values


@settings(max_examples=30, deadline=None)
@given(SIZES, SIZES, st.integers(0, 2**32 - 1))
def test_dequantised_weights_equal_those_of_the_loop(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, columns, generator=generator) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape((rows, columns)), generator=generator) + 1e-3
    assert torch.equal(dequantise_fp8(codes, scales), by_loops(codes, scales))


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
def test_there_and_back_loses_a_sixteenth_at_most(rows: int, columns: int, size: float, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    codes, scales = quantise_fp8(weight)
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.shape == scale_shape((rows, columns))
    back = dequantise_fp8(codes, scales)
    # 4 significant bits; codes below 2**-6 are 2**-9 apart
    allowed = torch.maximum(weight.abs() / 16, by_loops(torch.full_like(weight, 2.0**-10), scales))
    assert ((back - weight).abs() <= allowed * 1.001).all()


def test_blocks_of_zeros_and_extremes() -> None:
    weight = torch.zeros(130, 3)
    weight[129, 2] = -7.0
    codes, scales = quantise_fp8(weight)
    assert scales[0, 0] == 1.0
    assert torch.equal(dequantise_fp8(codes, scales), weight)
    _, scales = quantise_fp8(torch.full((1, 1), 1e-44))  # a 448th of it is zero
    assert scales.item() == 1.0


def test_scales_of_another_shape_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        dequantise_fp8(torch.zeros(129, 1).to(torch.float8_e4m3fn), torch.ones(1, 1))
