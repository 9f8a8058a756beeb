"""`head_linear` in Triton for few tokens: a program's whole weight comes in one go, before the wait.

Limits: contiguous last dimensions, K at most 512.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two

MOST_INPUTS = 512  # K: of one tile
TILE, WARPS = 16384, 4  # numbers of a weight that a program takes, on the device of kernels/tiles.py
MANY_INPUTS = 256  # more than these take twice as many of both


@triton.jit
def head_tile(
    x_ptr, weight_ptr, out_ptr, tokens, stride_xt, stride_wk, stride_ot, block,
    K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block of one head's outputs, of all tokens; waits for what is before once the weight is on its way."""
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_K)
    pointers = weight_ptr + dims[:, None] * stride_wk + column[None, :]
    if K == BLOCK_K and N % BLOCK_N == 0:
        weight = tl.load(pointers)
    else:
        weight = tl.load(pointers, mask=(dims < K)[:, None] & (column < N)[None, :], other=0.0)
    wait_for_previous(PDL)
    dtype = out_ptr.dtype.element_ty
    if BLOCK_T == 1:
        x = tl.load(x_ptr + dims, mask=dims < K, other=0.0).to(tl.float32)
        total = tl.sum(weight.to(tl.float32) * x[:, None], 0)
        tl.store(out_ptr + column, total.to(dtype), mask=column < N)
    else:
        token = tl.arange(0, BLOCK_T)
        inside = (token < tokens)[:, None]
        x = tl.load(x_ptr + token[:, None] * stride_xt + dims[None, :], mask=inside & (dims < K)[None, :], other=0.0)
        total = tl.dot(x, weight, input_precision="ieee").to(dtype)
        tl.store(out_ptr + token[:, None] * stride_ot + column[None, :], total, mask=inside & (column < N)[None, :])


@triton.jit(do_not_specialize=["tokens"])  # one compiled variant for every number of tokens of a block
def _head_kernel(
    x_ptr, weight_ptr, out_ptr, tokens, stride_xt, stride_xh, stride_wh, stride_wk,
    K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one head, of all tokens."""
    launch_dependents(PDL)
    head = tl.program_id(0)
    head_tile(
        x_ptr + head * stride_xh, weight_ptr + head.to(tl.int64) * stride_wh, out_ptr + head * N, tokens,
        stride_xt, stride_wk, tl.num_programs(0) * N, tl.program_id(1), K, N, BLOCK_T, BLOCK_K, BLOCK_N, PDL,
    )  # fmt: skip


def fits(weight: torch.Tensor) -> bool:
    """Whether the kernel takes that weight; float32 is the library's."""
    return weight.shape[1] <= MOST_INPUTS and weight.element_size() == 2


def head_linear_triton(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `benthic.kernels.head_linear.head_linear`."""
    tokens, heads, size = x.shape
    outputs = weight.shape[2]
    out = torch.empty((tokens, heads, outputs), dtype=x.dtype, device=x.device) if out is None else out
    if tokens == 0:
        return out
    assert x.stride(-1) == weight.stride(-1) == 1, "last dimensions are contiguous"
    more = 2 if size > MANY_INPUTS else 1
    blocks = head_blocks(tokens, size, outputs, more * TILE)
    warps = more * WARPS
    _head_kernel[(heads, triton.cdiv(outputs, blocks["BLOCK_N"]))](
        x, weight, out, tokens, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1),
        K=size, N=outputs, **blocks, num_warps=warps, **pdl(x.device),
    )  # fmt: skip
    return out


def head_blocks(tokens: int, size: int, outputs: int, tile: int = TILE) -> dict[str, int]:
    """A program's share: tokens, inputs and outputs, powers of two, at most `tile` numbers of the weight."""
    block_k = max(16, next_power_of_two(size))
    block_n = max(16, min(tile // block_k, next_power_of_two(outputs)))
    return {"BLOCK_T": 1 if tokens == 1 else max(16, next_power_of_two(tokens)), "BLOCK_K": block_k, "BLOCK_N": block_n}
