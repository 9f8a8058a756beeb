"""`narrow_linear` in Triton: few tokens one output a program, many tokens through the dot. No split sums, no atomics.

Limit: contiguous last dimensions.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two

FEW_PRODUCTS = 1 << 24  # up to as many multiplications (64 tokens x 128 outputs x 2,048) plain ones are quicker
TOKENS = 4  # of one program then


@triton.jit(do_not_specialize=["tokens"])  # one compiled variant for every number of tokens
def _few_kernel(
    x_ptr, weight_ptr, out_ptr, tokens, stride_x, stride_w, factor, N, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    output = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims = tl.arange(0, BLOCK_D)
    rows = x_ptr + token.to(tl.int64)[:, None] * stride_x
    weights = weight_ptr + output * stride_w + dims
    weight = tl.load(weights, mask=dims < D, other=0.0)
    wait_for_previous(PDL)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        inside = start + dims < D  # D need not be a multiple
        if start > 0:
            weight = tl.load(weights + start, mask=inside, other=0.0)
        mask = (token < tokens)[:, None] & inside[None, :]
        total += (
            tl.load(rows + (start + dims)[None, :], mask=mask, other=0.0).to(tl.float32)
            * weight.to(tl.float32)[None, :]
        )
    tl.store(out_ptr + token.to(tl.int64) * N + output, tl.sum(total, 1) * factor, mask=token < tokens)


@triton.jit(do_not_specialize=["tokens"])  # one compiled variant for every number of tokens
def _many_kernel(
    x_ptr, weight_ptr, out_ptr, tokens, stride_x, stride_w, factor, N, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    rows = x_ptr + token.to(tl.int64)[:, None] * stride_x  # token * stride passes 2**31 in long chunks
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_D):
        inside = (start + dims < D)[None, :]  # D need not be a multiple
        x = tl.load(rows + (start + dims)[None, :], mask=(token < tokens)[:, None] & inside, other=0.0)
        pointers = weight_ptr + output[:, None] * stride_w + (start + dims)[None, :]
        weight = tl.load(pointers, mask=(output < N)[:, None] & inside, other=0.0)
        if WIDE:  # of two types, or float32 already
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    target = out_ptr + token.to(tl.int64)[:, None] * N + output[None, :]
    tl.store(target, total * factor, mask=(token < tokens)[:, None] & (output < N)[None, :])


def narrow_linear_triton(x: torch.Tensor, weight: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """See `benthic.kernels.narrow_linear.narrow_linear`."""
    tokens, size = x.shape
    outputs = weight.shape[0]
    out = torch.empty((tokens, outputs), dtype=torch.float32, device=x.device)
    if tokens == 0 or outputs == 0:
        return out
    assert x.stride(-1) == weight.stride(-1) == 1, "last dimensions are contiguous"
    args = (x, weight, out, tokens, x.stride(0), weight.stride(0), factor, outputs)
    if tokens * outputs * size <= FEW_PRODUCTS:
        block_t = min(TOKENS, next_power_of_two(tokens))
        block_d = min(1024, next_power_of_two(size))
        _few_kernel[(outputs, triton.cdiv(tokens, block_t))](
            *args, D=size, BLOCK_T=block_t, BLOCK_D=block_d, num_warps=4, **pdl(x.device)
        )
        return out
    wide = x.dtype != weight.dtype or x.dtype == torch.float32
    block_t = 16 if tokens <= 1024 else 64
    block_n = min(64, max(16, next_power_of_two(outputs)))
    _many_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(outputs, block_n))](
        *args, D=size, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_D=32 if wide else 128, WIDE=wide, num_warps=4,
        num_stages=3, **pdl(x.device),
    )  # fmt: skip
    return out
