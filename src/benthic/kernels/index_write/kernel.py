"""`index_write` in Triton: one program a token, its row in registers. Limit: contiguous last dimensions."""

import torch
import triton
import triton.language as tl

from benthic.kernels.index_write.reference import index_views
from benthic.kernels.latent_math.kernel import write_index
from benthic.kernels.tiles import next_power_of_two


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])  # a graph's start anywhere in their buffer
def _index_write_kernel(
    x_ptr, weight_ptr, bias_ptr, table_ptr, positions_ptr, slots_ptr, key_ptr, scale_ptr,
    stride_x, stride_page, stride_scale_page,
    PAGE_SIZE: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_E: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # token * stride passes 2**31 in long chunks of wide products
    slot = tl.load(slots_ptr + token)  # int64: page * stride_page passes 2**31 in any pool over 2 G elements
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    write_index(
        x_ptr + token * stride_x, weight_ptr, bias_ptr, table_ptr + tl.load(positions_ptr + token) * P,
        key_ptr + page * stride_page + offset * E, scale_ptr + page * stride_scale_page + offset,
        E, P, INTERLEAVED, BLOCK_E, FP8,
    )  # fmt: skip


def index_write_triton(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    *,
    page_size: int,
    interleaved: bool,
) -> None:
    """See `benthic.kernels.index_write.index_write`."""
    tokens, size = projected.shape
    if tokens == 0:
        return
    assert projected.stride(-1) == 1, "the last dimension is contiguous"
    assert keys[0].is_contiguous(), "a page is contiguous"
    codes, scales = index_views(keys, page_size)
    _index_write_kernel[(tokens,)](
        projected, weight, bias, table, positions, slots, codes, scales,
        projected.stride(0), codes.stride(0), scales.stride(0),
        PAGE_SIZE=page_size, E=size, P=table.shape[1], INTERLEAVED=interleaved, BLOCK_E=next_power_of_two(size),
        FP8=keys.dtype == torch.uint8, num_warps=1,
    )  # fmt: skip
