"""rms_norm and rope: Triton and the reference against float64."""

import pytest
import torch

from benthic.kernels.rms_norm import rms_norm, rms_norm_reference
from benthic.kernels.rms_norm.kernel import rms_norm_triton
from benthic.kernels.rope import rope, rope_reference
from benthic.kernels.rope.kernel import rope_triton
from tests.support.attention_cases import assert_close
from tests.support.triton_interpreter import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 576])
@pytest.mark.parametrize("norm", [rms_norm_triton, rms_norm_reference, rms_norm])
def test_rms_norm_agrees(norm: object, size: int, dtype: torch.dtype) -> None:
    wide = torch.randn(5, size + 3, device=DEVICE).to(dtype)
    x, weight = wide[:, :size], torch.randn(size, device=DEVICE).to(dtype)  # strided rows
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_close(norm(x, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [rms_norm_triton, rms_norm_reference])
def test_rms_norm_adds_into_the_residual(norm: object, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 3, 2, 100, device=DEVICE).to(dtype)
    weight = torch.randn(100, device=DEVICE).to(dtype)
    total = (x.float() + residual.float()).to(dtype)
    expected = total.double() * torch.rsqrt(total.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    out = norm(x, weight, 1e-6, residual)
    assert_close(residual, total.double(), dtype)  # the interpreter cuts off bfloat16 where the GPU rounds
    assert_close(out, expected, dtype)


def test_rms_norm_of_no_rows() -> None:
    assert rms_norm_triton(torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE), 1e-6).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(1, 1, 16, 16), (6, 2, 32, 16), (9, 3, 64, 64)])
@pytest.mark.parametrize("rotate", [rope_triton, rope_reference, rope])
def test_rope_agrees(rotate: object, heads: int, kv_heads: int, head_dim: int, rotary: int, dtype: torch.dtype) -> None:
    fused = torch.randn(7, heads + 2 * kv_heads, head_dim, device=DEVICE).to(dtype)
    before = fused.double()
    angles = torch.arange(50, dtype=torch.float64)[:, None] * 100.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
    table = torch.cat([angles.cos(), angles.sin()], -1).float().to(DEVICE)
    positions = torch.tensor([0, 49, 3, 3, 17, 1, 30], device=DEVICE)
    rotate(fused[:, :heads], fused[:, heads : heads + kv_heads], table, positions)
    turn = torch.polar(torch.ones_like(angles), angles).to(DEVICE)[positions][:, None]
    half = rotary // 2
    pairs = torch.complex(before[..., :half], before[..., half:rotary]) * turn
    expected = torch.cat([pairs.real, pairs.imag, before[..., rotary:]], -1)
    expected[:, heads + kv_heads :] = before[:, heads + kv_heads :]  # v is left alone
    assert_close(fused, expected, dtype)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.zeros(2, 8), torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match="rope"):
        rope(torch.zeros(2, 1, 16), torch.zeros(2, 1, 16), torch.zeros(4, 32), torch.zeros(2, dtype=torch.int64))
