"""`latent_decode` in Triton, in two stages.

Stage one: a program takes one row, a block of its heads and one of SPLITS equal parts of the row's keys, and leaves a
normalised partial result with its log-sum-exp (base 2). Stage two merges the parts; where the row's other keys lie on
other ranks (PART), `split_merge` does. Nothing depends on the host.
Limits: those of `latent_prefill`.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.latent_prefill.kernel import (
    attend_tiles,
    count_selected,
    load_rows,
    pool_arguments,
    size_constants,
)
from benthic.kernels.latent_tiles import LatentTiles, hopper_rows, num_latent_splits, sparse_tiles
from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.split_merge.kernel import merge_splits
from benthic.kernels.tiles import next_power_of_two

_LOG2_E = 1.4426950408889634


# the table's width and where a batch's rows start change from step to step: no new compilation for their alignment
@triton.jit(
    do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "selected_ptr"]
)
def _decode_kernel(
    q_ptr, q_rope_ptr, codes_ptr, scales_ptr, rope_ptr, table_ptr, lens_ptr, selected_ptr, part_ptr, lse_ptr,
    scale_log2, num_selected, stride_qt, stride_qh, stride_rt, stride_rh, stride, stride_scale, stride_rope,
    stride_table, stride_selected, stride_pt, stride_ph, stride_ps,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_P: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, SPARSE: tl.constexpr,
    FP8: tl.constexpr, TURNED: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride_table and row * stride_pt may pass 2**31
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    end = tl.load(lens_ptr + row)
    selected = selected_ptr + row * stride_selected
    if SPARSE:
        bound = tl.minimum(end, num_selected)
        if PART:
            bound = tl.maximum(bound, 1)  # of a row without a token here the first entry is -1 too
        end = count_selected(selected, bound, BLOCK_K)
    tiles = tl.cdiv(end, BLOCK_N)
    per_split = tl.cdiv(tiles, SPLITS)
    first = split * per_split
    last = tl.minimum(first + per_split, tiles)
    inside = head < HEADS
    if first >= last:  # a short row leaves parts empty: their weight is 0, their result stays unwritten
        tl.store(lse_ptr + (row * HEADS + head) * SPLITS + split, float("-inf"), mask=inside)
        return
    q = load_rows(q_ptr, row * stride_qt + head * stride_qh, RANK, inside, BLOCK_R)
    q_rope = load_rows(q_rope_ptr, row * stride_rt + head * stride_rh, ROPE, inside, BLOCK_P)
    acc, best, total = attend_tiles(
        q, q_rope, codes_ptr, scales_ptr, rope_ptr, stride, stride_scale, stride_rope,
        selected, table_ptr + row * stride_table, first, last, end, end, scale_log2,
        RANK, BLOCK_R, ROPE, BLOCK_P, BLOCK_N, PAGE_SIZE, SPARSE, FP8, TURNED,
    )  # fmt: skip
    part_rows = row * stride_pt + head * stride_ph + split * stride_ps
    dims = tl.arange(0, BLOCK_R)
    kept = dims < RANK
    if TURNED:
        result = (acc / total[None, :]).to(part_ptr.dtype.element_ty)
        tl.store(part_ptr + part_rows[None, :] + dims[:, None], result, mask=inside[None, :] & kept[:, None])
    else:
        result = (acc / total[:, None]).to(part_ptr.dtype.element_ty)
        tl.store(part_ptr + part_rows[:, None] + dims[None, :], result, mask=inside[:, None] & kept[None, :])
    if SPLITS > 1 or PART:
        tl.store(lse_ptr + (row * HEADS + head) * SPLITS + split, best + tl.log2(total), mask=inside)


@triton.jit
def _merge_kernel(
    part_ptr, lse_ptr, out_ptr, stride_ot, stride_oh,
    HEADS: tl.constexpr, RANK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    splits = tl.arange(0, SPLITS)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = head < HEADS
    places = (row * HEADS + head)[:, None] * SPLITS + splits[None, :]
    wait_for_previous(PDL)
    # all is loaded at once, empty parts too, whose memory may hold NaN
    lse = tl.load(lse_ptr + places, mask=inside[:, None], other=0.0)
    mask = inside[:, None, None] & (dims < RANK)[None, None, :]
    parts = tl.load(part_ptr + places[:, :, None] * RANK + dims[None, None, :], mask=mask, other=0.0)
    weights = tl.exp2(lse - tl.max(lse, 1)[:, None])  # the first part is never empty, so the maximum is finite
    parts = tl.where((weights > 0)[:, :, None], parts, 0.0)
    result = tl.sum(parts * weights[:, :, None], 1) / tl.sum(weights, 1)[:, None]
    pointers = out_ptr + row * stride_ot + (head * stride_oh)[:, None] + dims[None, :]
    tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (dims < RANK)[None, :])


def latent_decode_triton(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    selected: torch.Tensor | None,
    max_seq_len: int,
    scale: float,
    out: torch.Tensor,
    *,
    rank: int,
    tiles: LatentTiles | None = None,
    splits: int | None = None,
    out_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.latent_decode.latent_decode`; `tiles` and `splits` override the table (tuning, tests).

    With `out_lse`, see `latent_decode_part`, whose `out` and `out_lse` are to be given.
    """
    batch, num_heads, _ = q_latent.shape
    if batch == 0:
        return out
    assert latents.stride(-1) == out.stride(-1) == seq_lens.stride(0) == 1, "last dimensions are contiguous"
    q_latent = q_latent if q_latent.stride(-1) == 1 else q_latent.contiguous()
    q_rope = q_rope if q_rope.stride(-1) == 1 else q_rope.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    sparse = selected is not None
    entries = page_table if selected is None else selected if selected.stride(1) == 1 else selected.contiguous()
    num_selected = entries.shape[1] if sparse else 1
    rows = None
    if sparse and tiles is None:
        rows = hopper_rows(num_heads, rank, q_rope.shape[2], latents, codes_of=q_latent.dtype)
    tiles = tiles or sparse_tiles(num_heads, rank, q_latent.element_size(), q_latent.device)
    blocks = triton.cdiv(num_heads, rows or tiles.rows)
    max_keys = min(num_selected, max_seq_len) if sparse else max_seq_len
    splits = splits or num_latent_splits(batch, blocks, max_keys, q_latent.device)
    part = out_lse is not None
    if splits == 1 and not part:
        parts, lse, part_strides = out, out, (out.stride(0), out.stride(1), 0)
    else:
        parts = torch.empty((batch, num_heads, splits, rank), dtype=torch.float32, device=out.device)
        lse = torch.empty((batch, num_heads, splits), dtype=torch.float32, device=out.device)
        part_strides = (parts.stride(0), parts.stride(1), parts.stride(2))
    if rows is not None:
        from benthic.kernels.latent_hopper.decode.kernel import decode_selected  # wants Gluon; older Tritons lack it

        decode_selected(
            q_latent, q_rope, latents, page_table, seq_lens, entries, scale * _LOG2_E, parts, part_strides, lse,
            splits=splits, rows=rows, part=part,
        )  # fmt: skip
    else:
        views, strides = pool_arguments(latents, rank)
        _decode_kernel[(batch, blocks, splits)](
            q_latent, q_rope, *views, page_table, seq_lens, entries, parts, lse, scale * _LOG2_E, num_selected,
            q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), *strides,
            page_table.stride(0), entries.stride(0), *part_strides,
            HEADS=num_heads, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, BLOCK_K=next_power_of_two(num_selected),
            SPARSE=sparse, TURNED=tiles.turned, SPLITS=splits, PART=part,
            **size_constants(rank, q_rope.shape[2], latents), num_warps=tiles.warps, num_stages=tiles.stages,
            **pdl(out.device),
        )  # fmt: skip
    if out_lse is not None:
        merge_splits(parts, lse, out, out_lse)
    elif splits > 1:
        # a block of 512 is one pass of a program's threads, so that sums stay within a thread
        block = min(512 if splits <= 8 else 128, next_power_of_two(rank))
        group = max(1, min(num_heads, 4 // splits))
        _merge_kernel[(batch, triton.cdiv(num_heads, group), triton.cdiv(rank, block))](
            parts, lse, out, out.stride(0), out.stride(1),
            HEADS=num_heads, RANK=rank, GROUP=next_power_of_two(group), BLOCK=block, SPLITS=splits, num_warps=4,
            **pdl(out.device),
        )  # fmt: skip
    return out
