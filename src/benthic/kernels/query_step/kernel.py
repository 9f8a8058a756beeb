"""`query_step` in Triton: programs of attention's heads, then of the indexer's; a row is one head of one token.

Many rows take two launches, whose tiles may differ: the second costs less than a tile that does not fit.
Limit: contiguous last dimensions.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.index_query.kernel import block_behind, index_query_triton
from benthic.kernels.latent_math.kernel import quantise_rows, turn_rows
from benthic.kernels.query_rope.kernel import FEW, MANY_ROWS, query_rope_triton
from benthic.kernels.query_step.reference import split
from benthic.kernels.tiles import next_power_of_two


# a graph's positions start anywhere in its buffer; one compiled variant for every number of tokens
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"], do_not_specialize=["num_tokens"])
def _query_step_kernel(
    x_ptr, weights_ptr, table_ptr, positions_ptr, codes_ptr, scaled_ptr, stride_t, stride_w, head_dim, num_tokens,
    H: tl.constexpr, HI: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    before = tl.cdiv(num_tokens * H, ROWS)  # programs of attention's heads come first
    if tl.program_id(0) < before:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        token = row // H
        inside = token < num_tokens
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        start = token.to(tl.int64) * stride_t  # passes 2**31 in long chunks of wide models
        rows = x_ptr + start + (row % H) * head_dim + (head_dim - P)
        turn_rows(rows, table_ptr + position * P, inside, P // 2, BLOCK_P, True)
    else:
        row = (tl.program_id(0) - before) * ROWS + tl.arange(0, ROWS)
        token = row // HI
        head = row % HI
        inside = token < num_tokens
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        start = token.to(tl.int64) * stride_t
        rows = x_ptr + start + H * head_dim + head * E
        table_rows = table_ptr + position * P
        if FP8:
            quantise_rows(
                rows, table_rows, weights_ptr + token * stride_w + head, inside,
                codes_ptr + row.to(tl.int64) * E, scaled_ptr + row,
                E, P // 2, INTERLEAVED, BLOCK_P, BLOCK_R,
            )  # fmt: skip
        else:
            turn_rows(rows, table_rows, inside, P // 2, BLOCK_P, INTERLEAVED)


def query_step_triton(
    product: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    interleaved: bool,
    fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `benthic.kernels.query_step.query_step`."""
    q, queries = split(product, num_heads, head_dim, weights.shape[1])
    tokens, index_heads, size = queries.shape
    if tokens * (num_heads + index_heads) >= MANY_ROWS:
        query_rope_triton(q, table, positions, rope_dim=rope_dim)
        return index_query_triton(
            queries, weights, table, positions, rope_dim=rope_dim, interleaved=interleaved, fp8=fp8
        )
    codes, scaled = queries, weights
    if fp8:
        codes = torch.empty((tokens, index_heads, size), dtype=torch.float8_e4m3fn, device=product.device)
        scaled = torch.empty((tokens, index_heads), dtype=torch.float32, device=product.device)
    if tokens == 0:
        return codes, scaled
    assert product.stride(-1) == weights.stride(-1) == 1, "last dimensions are contiguous"
    rows, warps = FEW
    _query_step_kernel[(triton.cdiv(tokens * num_heads, rows) + triton.cdiv(tokens * index_heads, rows),)](
        product, weights, table, positions, codes, scaled, product.stride(0), weights.stride(0), head_dim, tokens,
        H=num_heads, HI=index_heads, E=size, P=rope_dim, INTERLEAVED=interleaved, FP8=fp8, ROWS=rows,
        BLOCK_P=next_power_of_two(rope_dim // 2), BLOCK_R=block_behind(size, rope_dim), num_warps=warps,
    )  # fmt: skip
    return codes, scaled
