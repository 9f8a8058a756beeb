"""`paged_write` in Triton: one program a token. Limits: the last dimension of k, v and kv is contiguous."""

import torch
import triton
import triton.language as tl

from benthic.kernels.tiles import next_power_of_two


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a graph's slots start anywhere in its buffer
def _paged_write_kernel(
    kv_ptr, k_ptr, v_ptr, slots_ptr,
    stride_page, stride_kv, stride_pos, stride_head, stride_kt, stride_kh, stride_vt, stride_vh, num_heads,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # token * stride passes 2**31 in long chunks of wide models
    slot = tl.load(slots_ptr + token)  # int64: page * stride_page passes 2**31 in any pool over 2 G elements
    heads = tl.arange(0, BLOCK_G)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < num_heads) & (dims < HEAD_DIM)  # both are padded to powers of two
    target = kv_ptr + (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * stride_pos + heads * stride_head + dims
    k = tl.load(k_ptr + token * stride_kt + heads * stride_kh + dims, mask=mask)
    v = tl.load(v_ptr + token * stride_vt + heads * stride_vh + dims, mask=mask)
    tl.store(target, k.to(kv_ptr.dtype.element_ty), mask=mask)
    tl.store(target + stride_kv, v.to(kv_ptr.dtype.element_ty), mask=mask)


def paged_write_triton(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See `benthic.kernels.paged_write.paged_write`."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    assert kv.stride(-1) == 1, "the pool's last dimension is contiguous"
    k = k if k.stride(-1) == 1 else k.contiguous()
    v = v if v.stride(-1) == 1 else v.contiguous()
    _paged_write_kernel[(num_tokens,)](
        kv, k, v, slots.contiguous(),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), num_heads,
        PAGE_SIZE=kv.shape[2], HEAD_DIM=head_dim,
        BLOCK_G=next_power_of_two(num_heads), BLOCK_D=next_power_of_two(head_dim),
    )  # fmt: skip
