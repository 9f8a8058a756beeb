"""The splits of decode rows as one part, which other parts of the same rows can be merged with later."""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _merge_kernel(
    part_ptr, lse_ptr, out_ptr, total_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)  # rows x heads x splits x SIZE may pass 2**31
    head = row * tl.num_programs(1) + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(lse_ptr + head * SPLITS + splits)
    best = tl.max(lse, 0)
    best = tl.where(best > float("-inf"), best, 0.0)  # all splits are empty: -inf less -inf would be NaN
    weights = tl.exp2(lse - best)
    total = tl.sum(weights, 0)
    filled = tl.where(total > 0, total, 1.0)
    written = (weights > 0)[:, None] & (dims < SIZE)[None, :]  # an empty split's memory may hold NaN
    parts = tl.load(part_ptr + (head * SPLITS + splits)[:, None] * SIZE + dims[None, :], mask=written, other=0.0)
    tl.store(out_ptr + head * SIZE + dims, tl.sum(parts * weights[:, None], 0) / filled, mask=dims < SIZE)
    if tl.program_id(2) == 0:
        tl.store(total_ptr + head, tl.where(total > 0, (best + tl.log2(filled)) * _LN_2, float("-inf")))


def merge_splits(parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor) -> None:
    """Normalised parts [B, H, S, N] with their log-sum-exp, base 2, [B, H, S] -> out [B, H, N], out_lse [B, H], base e.

    All float32 and contiguous, S a power of two. A split with -inf is not read; a row of such alone gets 0 and -inf.
    """
    batch, heads, splits, size = parts.shape
    assert parts.is_contiguous(), "the kernel takes no strides"
    assert lse.is_contiguous(), "the kernel takes no strides"
    assert out.is_contiguous(), "the kernel takes no strides"
    assert out_lse.is_contiguous(), "the kernel takes no strides"
    block = min(128, next_power_of_two(size))
    _merge_kernel[(batch, heads, triton.cdiv(size, block))](
        parts, lse, out, out_lse, SIZE=size, BLOCK=block, SPLITS=splits, num_warps=4, **pdl(out.device)
    )
