"""`rms_norm` in Triton: one program a row, the row in registers. Limit: D at most 65,536, contiguous last dimension."""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, stride_x, stride_r, stride_o, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2**31 at 128k tokens x 16k columns
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D  # D need not be a power of two
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_r + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * stride_r + columns, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * stride_o + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `benthic.kernels.rms_norm.rms_norm`."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)  # a view wherever the leading dimensions allow it
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0] == 0:
        return out.view(x.shape)
    assert residual is None or residual.is_contiguous(), "the residual is changed in place through a flat view"
    flat = rows if residual is None else residual.view(-1, size)
    block = next_power_of_two(size)
    _rms_norm_kernel[(rows.shape[0],)](
        rows, weight, flat, out, rows.stride(0), flat.stride(0), out.stride(0), eps,
        D=size, BLOCK_D=block, RESIDUAL=residual is not None, num_warps=min(16, max(1, block // 512)), **pdl(x.device),
    )  # fmt: skip
    return out.view(x.shape)
