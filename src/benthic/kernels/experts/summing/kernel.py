"""Summing a token's partial results in Triton, in the order of its experts' columns; all of them are asked for at once.

Limit: contiguous tensors; with the norm D at most 65,536.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.experts.parts import ExpertParts
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two


@triton.jit
def _summed(partial_ptr, weights_ptr, places_ptr, token, dims, D, K: tl.constexpr):
    """float32 sums of `dims` of a token."""
    parts = ()
    for j in tl.static_range(K):
        pair = tl.load(places_ptr + token * K + j).to(tl.int64)  # pair * D passes 2**31
        mask = (dims < D) & (pair >= 0)
        parts += (tl.load(partial_ptr + pair * D + dims, mask=mask, other=0.0),)  # before any is needed
    total = tl.zeros(dims.shape, tl.float32)
    for j in tl.static_range(K):
        total += tl.load(weights_ptr + token * K + j) * parts[j].to(tl.float32)
    return total


@triton.jit
def _sum_kernel(
    partial_ptr, weights_ptr, places_ptr, out_ptr, D,
    K: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = _summed(partial_ptr, weights_ptr, places_ptr, token, dims, D, K)
    tl.store(out_ptr + token * D + dims, total.to(out_ptr.dtype.element_ty), mask=dims < D)


@triton.jit
def _sum_norm_kernel(
    partial_ptr, weights_ptr, places_ptr, residual_ptr, norm_ptr, out_ptr, eps,
    D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)  # token * D passes 2**31 at 512k tokens of 4,096
    dims = tl.arange(0, BLOCK_D)
    mask = dims < D  # D need not be a power of two
    weight = tl.load(norm_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    residual = tl.load(residual_ptr + token * D + dims, mask=mask, other=0.0)
    dtype = residual.dtype
    total = _summed(partial_ptr, weights_ptr, places_ptr, token, dims, D, K).to(dtype)
    x = (total.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(residual_ptr + token * D + dims, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * D + dims, (normed * weight).to(dtype), mask=mask)


def sum_parts(parts: ExpertParts, out: torch.Tensor) -> torch.Tensor:
    """Fill out [T, D], contiguous."""
    tokens, k = parts.weights.shape
    block = min(1024, next_power_of_two(out.shape[1]))
    _sum_kernel[(tokens, triton.cdiv(out.shape[1], block))](
        parts.partial, parts.weights, parts.places, out, out.shape[1], K=k, BLOCK_D=block, num_warps=4,
        **pdl(out.device),
    )  # fmt: skip
    return out


def sum_norm_triton(parts: ExpertParts, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    """See `benthic.kernels.experts.sum_norm`."""
    tokens, k = parts.weights.shape
    size = residual.shape[1]
    out = torch.empty_like(residual)
    assert residual.is_contiguous(), "rows are contiguous"
    if tokens:
        block = next_power_of_two(size)
        _sum_norm_kernel[(tokens,)](
            parts.partial, parts.weights, parts.places, residual, weight, out, eps,
            D=size, K=k, BLOCK_D=block, num_warps=min(16, max(1, block // 256)), **pdl(residual.device),
        )  # fmt: skip
    return out
