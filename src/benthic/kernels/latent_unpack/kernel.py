"""`latent_unpack` in Triton: a program turns some consecutive positions into numbers.

Limits: as those of `latent_prefill`, whose way of reading codes this shares, so that both give the same numbers.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.latent_prefill.kernel import load_latents, pool_arguments, size_constants

_BLOCK_N = 16  # positions a program


@triton.jit(do_not_specialize=["num_keys"], do_not_specialize_on_alignment=["table_ptr"])
def _unpack_kernel(
    codes_ptr, scales_ptr, rope_ptr, table_ptr, out_ptr, num_keys, stride, stride_scale, stride_rope,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROPE: tl.constexpr, BLOCK_P: tl.constexpr, PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = position < num_keys  # behind them the row may have no page: page 0 is read, nothing is written
    page = tl.load(table_ptr + position // PAGE_SIZE, mask=inside, other=0)
    slots = page * PAGE_SIZE + position % PAGE_SIZE
    dtype = out_ptr.dtype.element_ty
    latents = load_latents(codes_ptr, scales_ptr, slots, stride, stride_scale, RANK, BLOCK_R, FP8, dtype)
    dims = tl.arange(0, BLOCK_P)
    kept = (dims < ROPE)[None, :]  # of a rope part whose size is no power of two
    rope = tl.load(rope_ptr + slots.to(tl.int64)[:, None] * stride_rope + dims[None, :], mask=kept, other=0.0)
    rows = out_ptr + position.to(tl.int64)[:, None] * (RANK + ROPE)  # passes 2**31 from 3.7 million positions on
    tl.store(rows + RANK + dims[None, :], rope.to(dtype), mask=inside[:, None] & kept)
    dims = tl.arange(0, BLOCK_R)
    tl.store(rows + dims[None, :], latents, mask=inside[:, None] & (dims < RANK)[None, :])


def latent_unpack_triton(
    latents: torch.Tensor, page_row: torch.Tensor, num_keys: int, out: torch.Tensor, *, rank: int
) -> torch.Tensor:
    """See `benthic.kernels.latent_unpack.latent_unpack`; writes `out` and returns it."""
    assert latents.stride(-1) == page_row.stride(0) == 1, "last dimensions are contiguous"
    views, strides = pool_arguments(latents, rank)
    _unpack_kernel[(triton.cdiv(num_keys, _BLOCK_N),)](
        *views, page_row, out, num_keys, *strides, BLOCK_N=_BLOCK_N,
        **size_constants(rank, out.shape[2] - rank, latents), num_warps=4,
    )  # fmt: skip
    return out
