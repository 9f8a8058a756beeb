"""`norm_products` in Triton: every program takes the norm anew, of rows that all of them find in the cache.

Its rows of the weights are on their way by then. Limits: contiguous last dimensions, D at most 16,384.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.norm_products.reference import NormProducts
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two

ROWS = 4  # of a wide weight, of one program
TOKENS, OUTPUTS = 2, 4  # of one program where there are several tokens


@triton.jit
def _normed(x, residual, scales, eps, D: tl.constexpr, AXIS: tl.constexpr):
    """The sum of both, in their type, and its norm over AXIS."""
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    wide = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, AXIS, keep_dims=True) / D + eps)
    return total, ((wide * scale).to(residual.dtype).to(tl.float32) * scales.to(tl.float32)).to(residual.dtype)


@triton.jit
def _norm_row_kernel(
    added_ptr, residual_ptr, norm_ptr, weight_ptr, narrow_ptr, sum_ptr, normed_ptr, out_ptr, narrow_out_ptr,
    stride_w, stride_n, eps, factor,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of one row: of the N first, then of the M narrow ones. Program 0 keeps the sum and its norm."""
    launch_dependents(PDL)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    mask = dims < D  # D need not be a power of two
    row = weight_ptr + tl.where(output < N, output, 0).to(tl.int64) * stride_w
    if M > 0:
        narrow = tl.minimum(tl.maximum(output - N, 0), M - 1)  # past its rows: any, whose result is not stored
        row = tl.where(output < N, row, narrow_ptr + narrow.to(tl.int64) * stride_n)
    weight = tl.load(row[:, None] + dims[None, :], mask=mask[None, :], other=0.0)
    scales = tl.load(norm_ptr + dims, mask=mask, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(added_ptr + dims, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + dims, mask=mask, other=0.0)
    x, normed = _normed(x, residual, scales, eps, D, 0)
    if tl.program_id(0) == 0:
        tl.store(sum_ptr + dims, x, mask=mask)
        tl.store(normed_ptr + dims, normed, mask=mask)
    total = tl.sum(weight.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    if N > 0:
        tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty), mask=output < N)
    if M > 0:
        tl.store(narrow_out_ptr + output - N, total * factor, mask=(output >= N) & (output < N + M))


@triton.jit(do_not_specialize=["tokens"])  # one compiled variant for every number of tokens
def _norm_rows_kernel(
    added_ptr, residual_ptr, norm_ptr, narrow_ptr, sum_ptr, normed_ptr, narrow_out_ptr,
    tokens, stride_n, eps, factor,
    M: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_O narrow outputs of BLOCK_T rows. The first programs keep the sums and their norms."""
    launch_dependents(PDL)
    dims = tl.arange(0, BLOCK_D)
    mask = dims < D  # D need not be a power of two
    weights = ()
    for i in tl.static_range(BLOCK_O):
        output = tl.minimum(tl.program_id(0) * BLOCK_O + i, M - 1)
        weights += (tl.load(narrow_ptr + output * stride_n + dims, mask=mask, other=0.0),)
    scales = tl.load(norm_ptr + dims, mask=mask, other=0.0)[None, :]
    wait_for_previous(PDL)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < tokens
    places = token[:, None] * D + dims[None, :]
    inside = valid[:, None] & mask[None, :]
    x = tl.load(added_ptr + places, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + places, mask=inside, other=0.0)
    x, normed = _normed(x, residual, scales, eps, D, 1)
    if tl.program_id(0) == 0:
        tl.store(sum_ptr + places, x, mask=inside)
        tl.store(normed_ptr + places, normed, mask=inside)
    wide = normed.to(tl.float32)
    for i in tl.static_range(BLOCK_O):
        output = tl.program_id(0) * BLOCK_O + i
        total = tl.sum(wide * weights[i].to(tl.float32)[None, :], 1)
        tl.store(narrow_out_ptr + token * M + output, total * factor, mask=valid & (output < M))


def norm_products_triton(
    added: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None,
    narrow: torch.Tensor | None,
    factor: float = 1.0,
) -> NormProducts:
    """See `benthic.kernels.norm_products.norm_products`."""
    tokens, size = added.shape
    wide, few = (0 if matrix is None else matrix.shape[0] for matrix in (weight, narrow))
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    out = torch.empty((tokens, wide), dtype=added.dtype, device=added.device)
    narrow_out = torch.empty((tokens, few), dtype=torch.float32, device=added.device)
    first = narrow if weight is None else weight
    second = weight if narrow is None else narrow  # not looked at then
    assert first is not None
    assert second is not None
    assert added.is_contiguous(), "rows lie side by side"
    assert residual.is_contiguous(), "rows lie side by side"
    assert first.stride(-1) == second.stride(-1) == 1, "last dimensions are contiguous"
    block = next_power_of_two(size)
    if tokens == 1:
        rows = ROWS if wide else 1
        _norm_row_kernel[(triton.cdiv(wide + few, rows),)](
            added, residual, norm_weight, first, second, total, normed, out, narrow_out,
            first.stride(0), second.stride(0), eps, factor,
            N=wide, M=few, D=size, ROWS=rows, BLOCK_D=block, num_warps=min(16, max(1, block // 512)),
            **pdl(added.device),
        )  # fmt: skip
    elif tokens:
        _norm_rows_kernel[(triton.cdiv(few, OUTPUTS), triton.cdiv(tokens, TOKENS))](
            added, residual, norm_weight, second, total, normed, narrow_out, tokens, second.stride(0), eps, factor,
            M=few, D=size, BLOCK_T=TOKENS, BLOCK_O=OUTPUTS, BLOCK_D=block, num_warps=min(16, max(1, block // 512)),
            **pdl(added.device),
        )  # fmt: skip
    return NormProducts(total, normed, None if weight is None else out, None if narrow is None else narrow_out)
