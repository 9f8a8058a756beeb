"""`experts` in Triton: sort the pairs by expert, first product with its activation, second product, sum.

A pair is a token and one of its experts, p = token * k + column. An item is up to `rows` pairs of one expert; each
product's grid is (column tiles, items), so an expert's weights are read once per item, next to each other in time.
Nothing is read back and no atomics are used: graph-safe and deterministic. Limit: contiguous last dimensions.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.experts.parts import ExpertParts
from benthic.kernels.experts.single.kernel import single_token
from benthic.kernels.experts.sorting.kernel import sort_pairs
from benthic.kernels.experts.summing.kernel import sum_parts
from benthic.kernels.experts.tiles import ExpertPlan, ExpertTiles, plan_for
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two


@triton.jit
def _item(items_ptr, item):
    """(expert, first sorted pair, number of pairs)."""
    return tl.load(items_ptr + 3 * item), tl.load(items_ptr + 3 * item + 1), tl.load(items_ptr + 3 * item + 2)


@triton.jit
def _up_kernel(
    x_ptr, gate_up_ptr, act_ptr, order_ptr, items_ptr, stride_x, stride_e, stride_w,
    W: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act[pair] = silu(gate x) * up x for an item's pairs and COLUMNS / 2 of W; gate and up rows alternate."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert, first, count = _item(items_ptr, tl.program_id(1))
    if count == 0:
        return
    row = tl.arange(0, ROWS)
    valid = row < count
    token = tl.load(order_ptr + first + row, mask=valid, other=0) // K
    columns = tl.arange(0, COLUMNS)
    width = tl.program_id(0) * (COLUMNS // 2) + columns // 2
    weight_row = tl.where(width < W, width, 0) + (columns % 2) * W  # past W: any row, its result is not stored
    dims = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * stride_x + dims[None, :]  # token * stride passes 2**31
    w_ptrs = gate_up_ptr + expert.to(tl.int64) * stride_e + weight_row[None, :] * stride_w + dims[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, DEPTH):
        if D % DEPTH == 0:
            x = tl.load(x_ptrs + start, mask=valid[:, None], other=0.0)
            w = tl.load(w_ptrs + start)
        else:
            inside = start + dims < D
            x = tl.load(x_ptrs + start, mask=valid[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=inside[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
    act = gate / (1.0 + tl.exp(-gate)) * up
    out = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    target = act_ptr + (first + row).to(tl.int64)[:, None] * W + out[None, :]
    tl.store(target, act.to(act_ptr.dtype.element_ty), mask=valid[:, None] & (out < W)[None, :])


@triton.jit
def _down_kernel(
    act_ptr, down_ptr, partial_ptr, items_ptr, stride_e, stride_d,
    D: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial[pair] = down act[pair] for an item's pairs (sorted) and COLUMNS of D."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert, first, count = _item(items_ptr, tl.program_id(1))
    if count == 0:
        return
    row = tl.arange(0, ROWS)
    valid = row < count
    out = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = tl.where(out < D, out, 0)  # past D: any row, its result is not stored
    dims = tl.arange(0, DEPTH)
    act_ptrs = act_ptr + (first + row).to(tl.int64)[:, None] * W + dims[None, :]  # pairs * W passes 2**31
    w_ptrs = down_ptr + expert.to(tl.int64) * stride_e + weight_row[None, :] * stride_d + dims[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, W, DEPTH):
        if W % DEPTH == 0:
            act = tl.load(act_ptrs + start, mask=valid[:, None], other=0.0)
            w = tl.load(w_ptrs + start)
        else:
            inside = start + dims < W
            act = tl.load(act_ptrs + start, mask=valid[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=inside[:, None], other=0.0)
        total = tl.dot(act, w, total, input_precision="ieee")
    target = partial_ptr + (first + row).to(tl.int64)[:, None] * D + out[None, :]
    tl.store(target, total.to(partial_ptr.dtype.element_ty), mask=valid[:, None] & (out < D)[None, :])


@triton.jit
def _activate_kernel(both_ptr, act_ptr, W, BLOCK_W: tl.constexpr):
    """act = silu(gate) * up of one pair's [gate, up]."""
    pair = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    gate = tl.load(both_ptr + pair * 2 * W + dims, mask=dims < W, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + pair * 2 * W + W + dims, mask=dims < W, other=0.0).to(tl.float32)
    act = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(act_ptr + pair * W + dims, act.to(act_ptr.dtype.element_ty), mask=dims < W)


def experts_triton(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    plan: ExpertPlan | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.experts.experts`; `plan` overrides the table's, for tuning."""
    tokens, k = chosen.shape
    out = torch.empty((tokens, x.shape[1]), dtype=x.dtype, device=x.device) if out is None else out
    if tokens == 0:
        return out
    plan = plan or plan_for(tokens, k, gate_up.shape[0], x.dtype)
    if plan.single is not None and tokens == 1:
        return single_token(x, chosen, weights, gate_up, down, out, plan.single)
    return sum_parts(expert_parts(x, chosen, weights, gate_up, down, plan=plan), out)


def expert_parts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    plan: ExpertPlan | None = None,
) -> ExpertParts:
    """`experts_triton` up to the sum."""
    assert x.stride(-1) == gate_up.stride(-1) == down.stride(-1) == 1, "last dimensions are contiguous"
    assert chosen.is_contiguous()
    assert weights.is_contiguous()
    tokens, k = chosen.shape
    plan = plan or plan_for(tokens, k, gate_up.shape[0], x.dtype)
    if plan.grouped:
        return _grouped(x, chosen, weights, gate_up, down)
    num_experts, size, width = down.shape
    order, inverse, items, _ = sort_pairs(chosen, num_experts, plan.rows)
    act = torch.empty((tokens * k, width), dtype=x.dtype, device=x.device)
    launch_up(x, order, items, gate_up, act, k, plan.up)
    # few partials are kept in float32: they cost nothing beside the weights
    partial_dtype = torch.float32 if plan.rows <= 32 else x.dtype
    partial = torch.empty((tokens * k, size), dtype=partial_dtype, device=x.device)
    launch_down(act, items, down, partial, plan.down)
    return ExpertParts(partial, weights, inverse)


def launch_up(
    x: torch.Tensor,
    order: torch.Tensor,
    items: torch.Tensor,
    gate_up: torch.Tensor,
    act: torch.Tensor,
    k: int,
    tiles: ExpertTiles,
) -> None:
    """Fill act [P, W], in the order of the sorted pairs."""
    width = act.shape[1]
    _up_kernel[(triton.cdiv(2 * width, tiles.columns), items.shape[0])](
        x, gate_up, act, order, items, x.stride(0), gate_up.stride(0), gate_up.stride(1),
        W=width, D=x.shape[1], K=k, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl(x.device),
    )  # fmt: skip


def launch_down(
    act: torch.Tensor, items: torch.Tensor, down: torch.Tensor, partial: torch.Tensor, tiles: ExpertTiles
) -> None:
    """Fill partial [P, D], in the order of the sorted pairs."""
    size, width = down.shape[1:]
    _down_kernel[(triton.cdiv(size, tiles.columns), items.shape[0])](
        act, down, partial, items, down.stride(0), down.stride(1),
        D=size, W=width, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl(act.device),
    )  # fmt: skip


def _grouped(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> ExpertParts:
    """Both products by torch._grouped_mm: bfloat16 on a GPU of compute capability 9 or more."""
    tokens, k = chosen.shape
    num_experts, _, width = down.shape
    order, inverse, _, ends = sort_pairs(chosen, num_experts, 128)
    gathered = x.index_select(0, order // k)
    both = torch._grouped_mm(gathered, gate_up.transpose(1, 2), offs=ends)
    act = torch.empty((tokens * k, width), dtype=x.dtype, device=x.device)
    block = min(1024, next_power_of_two(width))
    _activate_kernel[(tokens * k, triton.cdiv(width, block))](both, act, width, BLOCK_W=block, num_warps=4)
    partial = torch._grouped_mm(act, down.transpose(1, 2), offs=ends)
    return ExpertParts(partial, weights, inverse)
