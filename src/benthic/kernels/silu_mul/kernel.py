"""`silu_mul` in Triton: one program a token and BLOCK columns. Limit: contiguous last dimension."""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two

BLOCK = 2048  # of 8 warps: 16 bytes of either a thread
FEW_TOKENS, FEW_BLOCK = 64, 512


@triton.jit
def _silu_mul_kernel(both_ptr, out_ptr, stride, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)  # token * stride passes 2**31 in long chunks of wide models
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = dims < W  # W need not be a multiple
    gate = tl.load(both_ptr + token * stride + dims, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + token * stride + W + dims, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * W + dims, (silu * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul_triton(both: torch.Tensor) -> torch.Tensor:
    """See `benthic.kernels.silu_mul.silu_mul`."""
    tokens, width = both.shape[0], both.shape[1] // 2
    out = torch.empty((tokens, width), dtype=both.dtype, device=both.device)
    if tokens == 0 or width == 0:
        return out
    assert both.stride(-1) == 1, "the last dimension is contiguous"
    block = min(FEW_BLOCK if tokens <= FEW_TOKENS else BLOCK, next_power_of_two(width))
    _silu_mul_kernel[(tokens, triton.cdiv(width, block))](
        both, out, both.stride(0), width, BLOCK=block, num_warps=max(1, block // 256), **pdl(both.device)
    )
    return out
