"""`latent_prefill` in Triton, and the loop over keys that it shares with `latent_decode`.

A tile of latents is read once and serves as keys and as values. The slots of the next tile's positions are looked up
one tile ahead, so that its gather waits for nothing. `TURNED` keeps the result as [latents, heads].
Limits: the page size a power of two, a pool whose pages lie one behind the other, contiguous last dimensions.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from benthic.kernels.latent_records import SCALE_BLOCK, latent_parts
from benthic.kernels.latent_tiles import LatentTiles, dense_tiles, hopper_rows, sparse_tiles
from benthic.kernels.tiles import next_power_of_two

_LOG2_E = 1.4426950408889634


@triton.jit
def load_rows(base, offsets, size, inside, BLOCK: tl.constexpr):
    """[rows, BLOCK] elements at base + offsets[row], zero behind `size` and where a row is not `inside`."""
    dims = tl.arange(0, BLOCK)
    return tl.load(base + offsets[:, None] + dims[None, :], mask=inside[:, None] & (dims < size)[None, :], other=0.0)


@triton.jit
def count_selected(selected, bound, BLOCK_K: tl.constexpr):
    """How many of the first `bound` (at least 1) entries are positions: all of them, or those before the first -1."""
    count = bound
    if tl.load(selected + bound - 1) < 0:
        index = tl.arange(0, BLOCK_K)
        count = tl.sum((tl.load(selected + index, mask=index < bound, other=-1) >= 0).to(tl.int32), 0)
    return count


@triton.jit
def find_slots(selected, table, tile, end, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, SPARSE: tl.constexpr):
    """Slots of a tile's keys. Behind `end`, where scores are masked, that of position 0: written, hence no NaN."""
    index = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    position = tl.load(selected + index, mask=index < end, other=0) if SPARSE else tl.where(index < end, index, 0)
    return tl.load(table + position // PAGE_SIZE) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def load_latents(
    codes_ptr, scales_ptr, slots, stride, stride_scale, RANK: tl.constexpr, BLOCK_R: tl.constexpr, FP8: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """The latents [slots, BLOCK_R] in the compute dtype."""
    dims = tl.arange(0, BLOCK_R)
    pointers = codes_ptr + slots.to(tl.int64)[:, None] * stride + dims[None, :]  # slot * stride passes 2**31
    latents = tl.load(pointers) if RANK == BLOCK_R else tl.load(pointers, mask=(dims < RANK)[None, :], other=0.0)
    if FP8:
        GROUP: tl.constexpr = 128 if BLOCK_R >= 128 else BLOCK_R
        GROUPS: tl.constexpr = BLOCK_R // GROUP
        groups = tl.arange(0, GROUPS)
        scales = tl.load(
            scales_ptr + slots.to(tl.int64)[:, None] * stride_scale + groups[None, :],
            mask=(groups * GROUP < RANK)[None, :], other=0.0,
        )  # fmt: skip
        wide = tl.reshape(latents.to(tl.float32), (slots.shape[0], GROUPS, GROUP)) * scales[:, :, None]
        latents = tl.reshape(wide, (slots.shape[0], BLOCK_R))
    return latents.to(dtype)


@triton.jit
def attend_tiles(
    q, q_rope, codes_ptr, scales_ptr, rope_ptr, stride, stride_scale, stride_rope,
    selected, table, first, last, end, limits, scale_log2,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROPE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SPARSE: tl.constexpr, FP8: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Tiles first … last - 1 of the keys: the sums, the largest logit (base 2) and the total weight of each query row.

    `limits`: a row sees key indices below its limit; a scalar, or [rows, 1]. All rows see index 0 of some tile.
    """
    rows: tl.constexpr = q.shape[0]
    dims = tl.arange(0, BLOCK_P)
    # finite, so that a tile without a visible key makes no NaN; less than any logit
    best = tl.full((rows,), -1.0e38, tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((BLOCK_R, rows), tl.float32) if TURNED else tl.zeros((rows, BLOCK_R), tl.float32)
    slots = find_slots(selected, table, first, end, BLOCK_N, PAGE_SIZE, SPARSE)
    for tile in tl.range(first, last):
        latents = load_latents(codes_ptr, scales_ptr, slots, stride, stride_scale, RANK, BLOCK_R, FP8, q.dtype)
        rope_pointers = rope_ptr + slots.to(tl.int64)[:, None] * stride_rope + dims[None, :]
        if ROPE == BLOCK_P:
            rope = tl.load(rope_pointers)
        else:
            rope = tl.load(rope_pointers, mask=(dims < ROPE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope.to(q.dtype)), scores, input_precision="ieee") * scale_log2
        index = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        scores = tl.where(index[None, :] < limits, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        probs = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(probs, 1)
        if TURNED:
            weights = tl.trans(probs.to(q.dtype))
            acc = tl.dot(tl.trans(latents), weights, acc * shrink[None, :], input_precision="ieee")
        else:
            acc = tl.dot(probs.to(q.dtype), latents, acc * shrink[:, None], input_precision="ieee")
        best = new_best
        slots = find_slots(selected, table, tile + 1, end, BLOCK_N, PAGE_SIZE, SPARSE)
    return acc, best, total


# chunks start anywhere: no new compilation for a position's divisibility
@triton.jit(
    do_not_specialize=["first_position", "num_tokens"], do_not_specialize_on_alignment=["table_ptr", "selected_ptr"]
)
def _prefill_kernel(
    q_ptr, q_rope_ptr, codes_ptr, scales_ptr, rope_ptr, table_ptr, selected_ptr, out_ptr, scale_log2,
    num_tokens, first_position, num_selected, stride_qt, stride_qh, stride_rt, stride_rh,
    stride, stride_scale, stride_rope, stride_selected, stride_ot, stride_oh,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_P: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, SPARSE: tl.constexpr,
    FP8: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tokens see most keys: start them first
    if SPARSE:  # one query and BLOCK_M of its heads
        head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        token = tl.full((BLOCK_M,), block, tl.int32)
        inside = head < HEADS
        selected = selected_ptr + block.to(tl.int64) * stride_selected
        end = count_selected(selected, tl.minimum(first_position + block + 1, num_selected), BLOCK_K)
        limits = end
    else:  # query rows are (token, head), heads fastest
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        head = row % HEADS
        token = row // HEADS
        inside = token < num_tokens  # the last block is rarely full
        selected = selected_ptr
        last_token = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // HEADS, num_tokens - 1)
        end = first_position + last_token + 1
        limits = (first_position + token + 1)[:, None]
    wide = token.to(tl.int64)  # token * stride passes 2**31 at 64k tokens x 128 heads x 512
    q = load_rows(q_ptr, wide * stride_qt + head * stride_qh, RANK, inside, BLOCK_R)
    q_rope = load_rows(q_rope_ptr, wide * stride_rt + head * stride_rh, ROPE, inside, BLOCK_P)
    acc, _, total = attend_tiles(
        q, q_rope, codes_ptr, scales_ptr, rope_ptr, stride, stride_scale, stride_rope,
        selected, table_ptr, 0, tl.cdiv(end, BLOCK_N), end, limits, scale_log2,
        RANK, BLOCK_R, ROPE, BLOCK_P, BLOCK_N, PAGE_SIZE, SPARSE, FP8, TURNED,
    )  # fmt: skip
    out_rows = wide * stride_ot + head * stride_oh
    dims = tl.arange(0, BLOCK_R)
    kept = dims < RANK
    if TURNED:
        pointers = out_ptr + out_rows[None, :] + dims[:, None]
        result = (acc / total[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(pointers, result, mask=inside[None, :] & kept[:, None])
    else:
        pointers = out_ptr + out_rows[:, None] + dims[None, :]
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(pointers, result, mask=inside[:, None] & kept[None, :])


def pool_arguments(latents: torch.Tensor, rank: int) -> tuple[list[torch.Tensor], list[int]]:
    """What the kernels take of a pool: codes, scales and rope part, and the elements between two slots of each."""
    assert latents.stride(0) == latents.shape[1] * latents.stride(1), "pages lie one behind the other"
    parts = latent_parts(latents, rank)
    scales = parts.rope if parts.scales is None else parts.scales  # not read without fp8
    views = [parts.latents, scales, parts.rope]
    return views, [view.stride(1) for view in views]


def size_constants(rank: int, rope_dim: int, latents: torch.Tensor) -> dict[str, int | bool]:
    """The compile-time sizes that both kernels take; blocks are at least the dot's 16."""
    assert SCALE_BLOCK == 128, "load_latents scales blocks of 128"
    return {
        "RANK": rank,
        "BLOCK_R": max(16, next_power_of_two(rank)),
        "ROPE": rope_dim,
        "BLOCK_P": max(16, next_power_of_two(rope_dim)),
        "PAGE_SIZE": latents.shape[1],
        "FP8": latents.dtype == torch.uint8,
    }


def _prefill_selected(rows: int, *args: Any) -> None:
    """By a kernel for Hopper; fewer heads than 32 take the tiles of 32."""
    from benthic.kernels.latent_hopper.pair.kernel import prefill_paired  # these want Gluon; older Tritons lack it
    from benthic.kernels.latent_hopper.prefill.kernel import prefill_selected

    (prefill_paired if rows == 32 else prefill_selected)(*args)


def latent_prefill_triton(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    page_row: torch.Tensor,
    first_position: int,
    selected: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    rank: int,
    tiles: LatentTiles | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.latent_prefill.latent_prefill`; `tiles` overrides the table (tuning, tests)."""
    num_tokens, num_heads, _ = q_latent.shape
    if num_tokens == 0:
        return out
    assert latents.stride(-1) == out.stride(-1) == page_row.stride(0) == 1, "last dimensions are contiguous"
    q_latent = q_latent if q_latent.stride(-1) == 1 else q_latent.contiguous()
    q_rope = q_rope if q_rope.stride(-1) == 1 else q_rope.contiguous()
    sparse = selected is not None
    entries = page_row if selected is None else selected if selected.stride(1) == 1 else selected.contiguous()
    if sparse and tiles is None and (rows := hopper_rows(max(32, num_heads), rank, q_rope.shape[2], latents)):
        args = (q_latent, q_rope, latents, page_row, first_position, entries, scale * _LOG2_E, out)
        _prefill_selected(rows, *args)
        return out
    if sparse:
        tiles = tiles or sparse_tiles(num_heads, rank, q_latent.element_size(), q_latent.device)
        grid = (num_tokens, triton.cdiv(num_heads, tiles.rows))
    else:
        tiles = tiles or dense_tiles(rank, q_latent.element_size(), q_latent.device)
        grid = (triton.cdiv(num_tokens * num_heads, tiles.rows), 1)
    views, strides = pool_arguments(latents, rank)
    num_selected = entries.shape[-1] if sparse else 1
    _prefill_kernel[grid](
        q_latent, q_rope, *views, page_row, entries, out, scale * _LOG2_E,
        num_tokens, first_position, num_selected, q_latent.stride(0), q_latent.stride(1), q_rope.stride(0),
        q_rope.stride(1), *strides, entries.stride(0), out.stride(0), out.stride(1),
        HEADS=num_heads, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, BLOCK_K=next_power_of_two(num_selected),
        SPARSE=sparse, TURNED=tiles.turned and sparse, **size_constants(rank, q_rope.shape[2], latents),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
