"""`rope` in Triton: one program a token and tensor, all heads at once. Limit: contiguous last dimension."""

import torch
import triton
import triton.language as tl

from benthic.kernels.tiles import next_power_of_two


@triton.jit
def _rotate(x_ptr, stride_h, num_heads, cos, sin, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_R)[None, :]
    mask = (heads < num_heads) & (dims < HALF)  # both are padded to powers of two
    pointers = x_ptr + heads * stride_h + dims
    low = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, (low * cos - high * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(pointers + HALF, (high * cos + low * sin).to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])  # a graph's positions start anywhere in its buffer
def _rope_kernel(
    q_ptr, k_ptr, table_ptr, positions_ptr, stride_qt, stride_qh, stride_kt, stride_kh, num_heads, num_kv_heads,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # token * stride passes 2**31 in long chunks of wide models
    dims = tl.arange(0, BLOCK_R)
    row = table_ptr + tl.load(positions_ptr + token) * 2 * HALF
    cos = tl.load(row + dims, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(row + HALF + dims, mask=dims < HALF, other=0.0)[None, :]
    if tl.program_id(1) == 0:
        _rotate(q_ptr + token * stride_qt, stride_qh, num_heads, cos, sin, HALF, BLOCK_H, BLOCK_R)
    else:
        _rotate(k_ptr + token * stride_kt, stride_kh, num_kv_heads, cos, sin, HALF, BLOCK_G, BLOCK_R)


def rope_triton(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """See `benthic.kernels.rope.rope`."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    assert q.stride(-1) == k.stride(-1) == 1, "last dimensions are contiguous"
    assert cos_sin.is_contiguous()
    half = cos_sin.shape[1] // 2
    _rope_kernel[(num_tokens, 2)](
        q, k, cos_sin, positions, q.stride(0), q.stride(1), k.stride(0), k.stride(1), num_heads, k.shape[1],
        HALF=half, BLOCK_H=next_power_of_two(num_heads), BLOCK_G=next_power_of_two(k.shape[1]),
        BLOCK_R=next_power_of_two(half), num_warps=4,
    )  # fmt: skip
