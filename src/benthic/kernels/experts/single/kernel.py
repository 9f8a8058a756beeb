"""`experts` of one token in Triton: plain multiplications, many wide loads in flight, no sort and no partial sums.

Limit: contiguous last dimensions.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.experts.tiles import SingleTiles
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous


@triton.jit
def _up_kernel(
    x_ptr, gate_up_ptr, act_ptr, chosen_ptr, stride_e, stride_w,
    W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act[j] = silu(gate x) * up x of ROWS rows of the j-th expert."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert = tl.load(chosen_ptr + tl.program_id(1)).to(tl.int64)  # expert * stride passes 2**31
    if expert < 0:
        return  # none: nobody reads its part of act
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DEPTH)
    gates = gate_up_ptr + expert * stride_e + tl.where(row < W, row, 0)[:, None] * stride_w + dims[None, :]
    ups = gates + W * stride_w
    gate = tl.zeros((ROWS, DEPTH), tl.float32)
    up = tl.zeros((ROWS, DEPTH), tl.float32)
    for start in tl.static_range(0, D, DEPTH):  # unrolled: the next loads need not wait for the sums
        inside = start + dims < D  # D need not be a multiple
        x = tl.load(x_ptr + start + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gates + start, mask=inside[None, :], other=0.0).to(tl.float32) * x
        up += tl.load(ups + start, mask=inside[None, :], other=0.0).to(tl.float32) * x
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    act = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    tl.store(act_ptr + tl.program_id(1) * W + row, act.to(act_ptr.dtype.element_ty), mask=row < W)


@triton.jit
def _down_kernel(
    act_ptr, down_ptr, weights_ptr, out_ptr, chosen_ptr, stride_e, stride_d,
    D: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out = sum over the experts of weight * down act, of ROWS outputs."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DEPTH)
    rows = down_ptr + tl.where(row < D, row, 0)[:, None] * stride_d + dims[None, :]
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for j in tl.static_range(K):
        expert = tl.load(chosen_ptr + j).to(tl.int64)  # expert * stride passes 2**31
        weight = tl.load(weights_ptr + j)
        for start in tl.static_range(0, W, DEPTH):
            inside = (start + dims < W) & (expert >= 0)  # W need not be a multiple; -1: none
            act = tl.load(act_ptr + j * W + start + dims, mask=inside, other=0.0).to(tl.float32) * weight
            tile = tl.load(rows + expert * stride_e + start, mask=inside[None, :], other=0.0).to(tl.float32)
            total += tile * act[None, :]
    tl.store(out_ptr + row, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=row < D)


def single_token(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    tiles: tuple[SingleTiles, SingleTiles],
) -> torch.Tensor:
    """See `benthic.kernels.experts.experts`; x [1, D]."""
    k = chosen.shape[1]
    act = torch.empty((k, down.shape[2]), dtype=x.dtype, device=x.device)
    launch_up(x, chosen, gate_up, act, tiles[0])
    launch_down(act, chosen, weights, down, out, tiles[1])
    return out


def launch_up(
    x: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, act: torch.Tensor, tiles: SingleTiles
) -> None:
    """Fill act [k, W]."""
    k, width = act.shape
    _up_kernel[(triton.cdiv(width, tiles.rows), k)](
        x, gate_up, act, chosen, gate_up.stride(0), gate_up.stride(1),
        W=width, D=x.shape[1], ROWS=tiles.rows, DEPTH=tiles.depth, num_warps=tiles.warps, **pdl(x.device),
    )  # fmt: skip


def launch_down(
    act: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    tiles: SingleTiles,
) -> None:
    """Fill out [1, D]."""
    k, width = act.shape
    _down_kernel[(triton.cdiv(out.shape[1], tiles.rows),)](
        act, down, weights, out, chosen, down.stride(0), down.stride(1),
        D=out.shape[1], W=width, K=k, ROWS=tiles.rows, DEPTH=tiles.depth, num_warps=tiles.warps,
        **pdl(act.device),
    )  # fmt: skip
