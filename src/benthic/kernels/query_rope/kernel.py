"""`query_rope` in Triton: one program a number of rows, a row being one head of one token. Limit: contiguous heads."""

import torch
import triton
import triton.language as tl

from benthic.kernels.latent_math.kernel import turn_rows
from benthic.kernels.tiles import next_power_of_two

FEW = (16, 4)  # rows and warps of one program: 16 bytes a thread, so that few rows are spread
MANY = (64, 4)  # four times as many bytes in flight
MANY_ROWS = 8192


# a graph's positions start anywhere in its buffer; one compiled variant for every number of tokens
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"], do_not_specialize=["num_rows"])
def _query_rope_kernel(
    q_ptr, table_ptr, positions_ptr, stride_t, stride_h, first_dim, num_rows,
    H: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    token = row // H
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    rows = q_ptr + token.to(tl.int64) * stride_t + (row % H) * stride_h + first_dim  # token * stride passes 2**31
    turn_rows(rows, table_ptr + position * (2 * HALF), inside, HALF, BLOCK_P, INTERLEAVED)


def query_rope_triton(q: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, *, rope_dim: int) -> None:
    """See `benthic.kernels.query_rope.query_rope`."""
    turn_in_place(q, table, positions, q.shape[2] - rope_dim, interleaved=True)


def turn_in_place(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, first_dim: int, *, interleaved: bool
) -> None:
    """Turn the P components from `first_dim` on of each head of x [T, H, n]."""
    tokens, num_heads, _ = x.shape
    if tokens == 0 or num_heads == 0:
        return
    assert x.stride(-1) == 1, "the last dimension is contiguous"
    half = table.shape[1] // 2
    rows, warps = MANY if tokens * num_heads >= MANY_ROWS else FEW
    _query_rope_kernel[(triton.cdiv(tokens * num_heads, rows),)](
        x, table, positions, x.stride(0), x.stride(1), first_dim, tokens * num_heads,
        H=num_heads, HALF=half, INTERLEAVED=interleaved, ROWS=rows, BLOCK_P=next_power_of_two(half), num_warps=warps,
    )  # fmt: skip
