"""`index_query` in Triton: one program a number of rows, a row being one head of one token. Limit: contiguous heads."""

import torch
import triton
import triton.language as tl

from benthic.kernels.latent_math.kernel import quantise_rows
from benthic.kernels.query_rope.kernel import FEW, MANY_ROWS, turn_in_place
from benthic.kernels.tiles import next_power_of_two

MANY = {False: (32, 4), True: (32, 8)}  # by INTERLEAVED; larger tiles would exchange values through shared memory


# a graph's positions start anywhere in its buffer; one compiled variant for every number of tokens
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"], do_not_specialize=["num_rows"])
def _index_query_kernel(
    x_ptr, weights_ptr, table_ptr, positions_ptr, codes_ptr, scaled_ptr, stride_t, stride_h, stride_w, num_rows,
    H: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    token = row // H
    head = row % H
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    rows = x_ptr + token.to(tl.int64) * stride_t + head * stride_h  # token * stride passes 2**31 in long chunks
    quantise_rows(
        rows, table_ptr + position * (2 * HALF), weights_ptr + token * stride_w + head, inside,
        codes_ptr + row.to(tl.int64) * E, scaled_ptr + row,
        E, HALF, INTERLEAVED, BLOCK_P, BLOCK_R,
    )  # fmt: skip


def index_query_triton(
    queries: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    *,
    rope_dim: int,
    interleaved: bool,
    fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `benthic.kernels.index_query.index_query`."""
    if not fp8:
        turn_in_place(queries, table, positions, 0, interleaved=interleaved)
        return queries, weights
    tokens, num_heads, size = queries.shape
    codes = torch.empty((tokens, num_heads, size), dtype=torch.float8_e4m3fn, device=queries.device)
    scaled = torch.empty((tokens, num_heads), dtype=torch.float32, device=queries.device)
    if tokens == 0:
        return codes, scaled
    assert queries.stride(-1) == weights.stride(-1) == 1, "last dimensions are contiguous"
    rows, warps = MANY[interleaved] if tokens * num_heads >= MANY_ROWS else FEW
    _index_query_kernel[(triton.cdiv(tokens * num_heads, rows),)](
        queries, weights, table, positions, codes, scaled,
        queries.stride(0), queries.stride(1), weights.stride(0), tokens * num_heads,
        H=num_heads, E=size, HALF=rope_dim // 2, INTERLEAVED=interleaved, ROWS=rows,
        BLOCK_P=next_power_of_two(rope_dim // 2), BLOCK_R=block_behind(size, rope_dim), num_warps=warps,
    )  # fmt: skip
    return codes, scaled


def block_behind(size: int, rope_dim: int) -> int:
    """Columns behind the turned ones, padded to a power of two; 0 if there are none."""
    return next_power_of_two(size - rope_dim) if size > rope_dim else 0
