"""`query_step` in Triton: programs that absorb, then those of attention's heads, then of the indexer's.

A row is one head of one token. Many rows take a launch for each, whose tiles may differ: that costs less than tiles
that do not fit.
Limit: contiguous last dimensions.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.head_linear import MOST_TOKENS, head_linear
from benthic.kernels.head_linear.kernel import WARPS, fits, head_blocks, head_tile
from benthic.kernels.index_query.kernel import block_behind, index_query_triton
from benthic.kernels.latent_math.kernel import quantise_rows, turn_rows
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.query_rope.kernel import FEW, MANY_ROWS, query_rope_triton
from benthic.kernels.query_step.reference import Turned, split
from benthic.kernels.tiles import next_power_of_two


# a graph's positions start anywhere in its buffer; one compiled variant for every number of tokens
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"], do_not_specialize=["num_tokens"])
def _query_step_kernel(
    x_ptr, weights_ptr, table_ptr, positions_ptr, codes_ptr, scaled_ptr, keys_ptr, latent_ptr,
    stride_t, stride_w, stride_kh, stride_kn, head_dim, num_tokens,
    H: tl.constexpr, HI: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    ABSORBING: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ABSORBING programs a head; what they read and what the others turn are different columns."""
    launch_dependents(PDL)
    program = tl.program_id(0) - H * ABSORBING
    if program < 0:
        head = tl.program_id(0) // ABSORBING
        head_tile(
            x_ptr + head * head_dim, keys_ptr + head.to(tl.int64) * stride_kh, latent_ptr + head * N, num_tokens,
            stride_t, stride_kn, H * N, tl.program_id(0) % ABSORBING, K, N, BLOCK_T, BLOCK_K, BLOCK_N, PDL,
        )  # fmt: skip
    else:
        wait_for_previous(PDL)
        _turn(
            x_ptr, weights_ptr, table_ptr, positions_ptr, codes_ptr, scaled_ptr, stride_t, stride_w, head_dim,
            num_tokens, program, H, HI, E, P, INTERLEAVED, FP8, ROWS, BLOCK_P, BLOCK_R,
        )  # fmt: skip


@triton.jit
def _turn(
    x_ptr, weights_ptr, table_ptr, positions_ptr, codes_ptr, scaled_ptr, stride_t, stride_w, head_dim,
    num_tokens, program,
    H: tl.constexpr, HI: tl.constexpr, E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """ROWS heads of tokens."""
    before = tl.cdiv(num_tokens * H, ROWS)  # programs of attention's heads come first
    if program < before:
        row = program * ROWS + tl.arange(0, ROWS)
        token = row // H
        inside = token < num_tokens
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        start = token.to(tl.int64) * stride_t  # passes 2**31 in long chunks of wide models
        rows = x_ptr + start + (row % H) * head_dim + (head_dim - P)
        turn_rows(rows, table_ptr + position * P, inside, P // 2, BLOCK_P, True)
    else:
        row = (program - before) * ROWS + tl.arange(0, ROWS)
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
    keys: torch.Tensor | None = None,
) -> Turned:
    """See `benthic.kernels.query_step.query_step`."""
    q, queries = split(product, num_heads, head_dim, weights.shape[1])
    tokens, index_heads, size = queries.shape
    assert product.stride(-1) == weights.stride(-1) == 1, "last dimensions are contiguous"
    together = keys is not None and 0 < tokens <= MOST_TOKENS and fits(keys)
    latent = None if keys is None or together else head_linear(q[..., : keys.shape[1]], keys)
    if tokens * (num_heads + index_heads) >= MANY_ROWS:
        query_rope_triton(q, table, positions, rope_dim=rope_dim)
        return Turned(
            *index_query_triton(
                queries, weights, table, positions, rope_dim=rope_dim, interleaved=interleaved, fp8=fp8
            ),
            latent,
        )
    codes, scaled = queries, weights
    if fp8:
        codes = torch.empty((tokens, index_heads, size), dtype=torch.float8_e4m3fn, device=product.device)
        scaled = torch.empty((tokens, index_heads), dtype=torch.float32, device=product.device)
    if tokens == 0:
        return Turned(codes, scaled, latent)
    shape = {"ABSORBING": 0, "K": 1, "N": 1, "BLOCK_T": 1, "BLOCK_K": 1, "BLOCK_N": 1}
    strides = 0, 0
    if together:
        assert keys is not None
        assert keys.stride(-1) == 1, "last dimensions are contiguous"
        _, inputs, outputs = keys.shape
        latent = torch.empty((tokens, num_heads, outputs), dtype=product.dtype, device=product.device)
        blocks = head_blocks(tokens, inputs, outputs)
        shape = {"ABSORBING": triton.cdiv(outputs, blocks["BLOCK_N"]), "K": inputs, "N": outputs} | blocks
        strides = keys.stride()[:2]
    rows, warps = FEW
    assert warps == WARPS, "both kinds of programs are of one launch"
    turning = triton.cdiv(tokens * num_heads, rows) + triton.cdiv(tokens * index_heads, rows)
    _query_step_kernel[(num_heads * shape["ABSORBING"] + turning,)](
        product, weights, table, positions, codes, scaled,
        product if keys is None else keys, product if latent is None else latent,
        product.stride(0), weights.stride(0), *strides, head_dim, tokens,
        H=num_heads, HI=index_heads, E=size, P=rope_dim, INTERLEAVED=interleaved, FP8=fp8, ROWS=rows,
        BLOCK_P=next_power_of_two(rope_dim // 2), BLOCK_R=block_behind(size, rope_dim), **shape, num_warps=warps,
        **pdl(product.device),
    )  # fmt: skip
    return Turned(codes, scaled, latent)
