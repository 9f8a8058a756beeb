"""`latent_step` in Triton: three programs a token (query norm, latent, index key). Limit: contiguous rows."""

import torch
import triton
import triton.language as tl

from benthic.kernels.index_write.reference import index_views
from benthic.kernels.latent_math.kernel import normed_row, write_index, write_latent
from benthic.kernels.latent_records import SCALE_BLOCK, latent_parts
from benthic.kernels.latent_step.reference import IndexStep
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])  # a graph's start anywhere in their buffer
def _latent_step_kernel(
    x_ptr, out_ptr, q_weight_ptr, weight_ptr, eps, table_ptr, positions_ptr, slots_ptr,
    record_ptr, scale_ptr, rope_ptr, index_weight_ptr, index_bias_ptr, key_ptr, key_scale_ptr,
    stride_x, stride_page, stride_token, stride_scale_page, stride_scale, stride_rope_page, stride_rope,
    stride_key_page, stride_key_scale_page,
    PAGE_SIZE: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, E: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr, FP8: tl.constexpr, INDEX_FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)  # token * stride passes 2**31 in long chunks of wide products
    part = tl.program_id(1)
    row = x_ptr + token * stride_x
    if part == 0:
        dims = tl.arange(0, BLOCK_Q)
        mask = dims < Q  # padded to a power of two
        x = tl.load(row + dims, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(q_weight_ptr + dims, mask=mask, other=0.0).to(x_ptr.dtype.element_ty)
        normed = normed_row(x, weight, eps, Q).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * Q + dims, normed, mask=mask)
    else:
        slot = tl.load(slots_ptr + token)  # int64: page * stride_page passes 2**31 in any pool over 2 G elements
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        table_row = table_ptr + tl.load(positions_ptr + token) * P
        if part == 1:
            write_latent(
                row + Q, weight_ptr, eps, table_row,
                record_ptr + page * stride_page + offset * stride_token,
                scale_ptr + page * stride_scale_page + offset * stride_scale,
                rope_ptr + page * stride_rope_page + offset * stride_rope,
                R, P, BLOCKS, BLOCK_P, FP8,
            )  # fmt: skip
        else:
            write_index(
                row + Q + R + P, index_weight_ptr, index_bias_ptr, table_row,
                key_ptr + page * stride_key_page + offset * E, key_scale_ptr + page * stride_key_scale_page + offset,
                E, P, INTERLEAVED, BLOCK_E, INDEX_FP8,
            )  # fmt: skip


def latent_step_triton(
    product: torch.Tensor,
    q_norm_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    *,
    rank: int,
    index: IndexStep | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.latent_step.latent_step`."""
    tokens, width, rope_dim = product.shape[0], q_norm_weight.shape[0], table.shape[1]
    out = torch.empty((tokens, width), dtype=product.dtype, device=product.device)
    if tokens == 0:
        return out
    assert product.stride(-1) == latents.stride(-1) == 1, "last dimensions are contiguous"
    parts = latent_parts(latents, rank)
    record, rope = parts.latents, parts.rope
    scales = record if parts.scales is None else parts.scales  # not looked at then
    page_size, keys, key_scales, size = latents.shape[1], latents, latents, 1
    weight, bias = norm_weight, norm_weight  # not looked at without an index, as are keys and key_scales
    if index is not None:
        assert index.page_size == page_size, "latents and index keys lie in the same pages"
        keys, key_scales = index_views(index.keys, page_size)
        weight, bias, size = index.weight, index.bias, index.weight.shape[0]
    _latent_step_kernel[(tokens, 2 if index is None else 3)](
        product, out, q_norm_weight, norm_weight, eps, table, positions, slots,
        record, scales, rope, weight, bias, keys, key_scales,
        product.stride(0), record.stride(0), record.stride(1), scales.stride(0), scales.stride(1),
        rope.stride(0), rope.stride(1), keys.stride(0), key_scales.stride(0),
        PAGE_SIZE=page_size, Q=width, R=rank, P=rope_dim, E=size,
        INTERLEAVED=index is not None and index.interleaved, BLOCK_Q=next_power_of_two(width),
        BLOCKS=next_power_of_two(-(-rank // SCALE_BLOCK)), BLOCK_P=next_power_of_two(rope_dim),
        BLOCK_E=next_power_of_two(size), FP8=latents.dtype == torch.uint8,
        INDEX_FP8=index is not None and index.keys.dtype == torch.uint8, num_warps=4,
        **pdl(product.device),
    )  # fmt: skip
    return out
