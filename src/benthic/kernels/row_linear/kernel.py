"""`row_linear` in Triton, by plain multiplications: no split sums, no atomics. Limit: contiguous last dimensions."""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous

AHEAD = 4  # tiles of a weight that a program asks for before it waits


@triton.jit
def _tile(rows, start, dims, D: tl.constexpr, DEPTH: tl.constexpr):
    """DEPTH of a weight's columns, from `start` on; zeros behind its D."""
    if D % DEPTH == 0:
        tile = tl.load(rows + start)
    else:
        tile = tl.load(rows + start, mask=(start + dims < D)[None, :], other=0.0)
    return tile


@triton.jit
def _row_kernel(
    x_ptr, weight_ptr, out_ptr, stride_w,
    N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS outputs. The first AHEAD of the weight's tiles come before the wait."""
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DEPTH)
    # past N: any row, its result is not stored; row * stride passes 2**31 in large vocabularies
    rows = weight_ptr + tl.where(row < N, row, 0).to(tl.int64)[:, None] * stride_w + dims[None, :]
    ahead = ()
    for start in tl.static_range(0, AHEAD * DEPTH, DEPTH):
        ahead += (_tile(rows, start, dims, D, DEPTH),)
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for start in tl.static_range(0, D, DEPTH):  # unrolled: the next loads need not wait for the sums
        if D % DEPTH == 0:
            x = tl.load(x_ptr + start + dims)
        else:
            x = tl.load(x_ptr + start + dims, mask=start + dims < D, other=0.0)
        weight = ahead[start // DEPTH] if start < AHEAD * DEPTH else _tile(rows, start, dims, D, DEPTH)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out_ptr + row, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=row < N)


def row_linear_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `benthic.kernels.row_linear.row_linear`."""
    outputs, size = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    if outputs == 0:
        return out
    assert x.stride(-1) == weight.stride(-1) == 1, "last dimensions are contiguous"
    rows, depth, warps = tiles(x.element_size())
    ahead = min(AHEAD, triton.cdiv(size, depth))
    _row_kernel[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        out,
        weight.stride(0),
        N=outputs,
        D=size,
        ROWS=rows,
        DEPTH=depth,
        AHEAD=ahead,
        num_warps=warps,
        **pdl(x.device),
    )
    return out


def tiles(element_bytes: int) -> tuple[int, int, int]:
    """Rows of the weight, inputs at a time and warps of a program; on the device of kernels/tiles.py."""
    return 4, 1024 if element_bytes == 2 else 512, 4
