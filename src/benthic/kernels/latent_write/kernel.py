"""`latent_write` in Triton: one program a token, its row in registers. Limit: contiguous last dimensions."""

import torch
import triton
import triton.language as tl

from benthic.kernels.latent_math.kernel import write_latent
from benthic.kernels.latent_records import SCALE_BLOCK, latent_parts
from benthic.kernels.tiles import next_power_of_two


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])  # a graph's start anywhere in their buffer
def _latent_write_kernel(
    x_ptr, weight_ptr, eps, table_ptr, positions_ptr, slots_ptr, record_ptr, scale_ptr, rope_ptr,
    stride_x, stride_page, stride_token, stride_scale_page, stride_scale, stride_rope_page, stride_rope,
    PAGE_SIZE: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # token * stride passes 2**31 in long chunks of wide products
    slot = tl.load(slots_ptr + token)  # int64: page * stride_page passes 2**31 in any pool over 2 G elements
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    write_latent(
        x_ptr + token * stride_x, weight_ptr, eps, table_ptr + tl.load(positions_ptr + token) * P,
        record_ptr + page * stride_page + offset * stride_token,
        scale_ptr + page * stride_scale_page + offset * stride_scale,
        rope_ptr + page * stride_rope_page + offset * stride_rope,
        R, P, BLOCKS, BLOCK_P, FP8,
    )  # fmt: skip


def latent_write_triton(
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    *,
    rank: int,
) -> None:
    """See `benthic.kernels.latent_write.latent_write`."""
    tokens = projected.shape[0]
    if tokens == 0:
        return
    assert projected.stride(-1) == latents.stride(-1) == 1, "last dimensions are contiguous"
    parts = latent_parts(latents, rank)
    record, rope = parts.latents, parts.rope
    scales = record if parts.scales is None else parts.scales  # not looked at then
    rope_dim = table.shape[1]
    _latent_write_kernel[(tokens,)](
        projected, norm_weight, eps, table, positions, slots, record, scales, rope,
        projected.stride(0), record.stride(0), record.stride(1), scales.stride(0), scales.stride(1),
        rope.stride(0), rope.stride(1),
        PAGE_SIZE=latents.shape[1], R=rank, P=rope_dim, BLOCKS=next_power_of_two(-(-rank // SCALE_BLOCK)),
        BLOCK_P=next_power_of_two(rope_dim), FP8=latents.dtype == torch.uint8, num_warps=4,
    )  # fmt: skip
