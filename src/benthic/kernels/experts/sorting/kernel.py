"""Sorting pairs by expert in Triton, in one launch: each expert's program looks at all pairs.

Three launches over blocks of pairs were slower (400 µs against 57 for 65,536 pairs of 64 experts).
Limit: at most 2**31 pairs. Stable, no atomics on memory, nothing read back.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two

BLOCK = 4096  # pairs that a program looks at together, at most


@triton.jit
def _store_items(items_ptr, expert, first, count, item, last_item, ROWS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Items `item` to `last_item` of one expert's pairs; those behind its last pair are empty."""
    for base in range(item, last_item, BLOCK_I):
        i = base + tl.arange(0, BLOCK_I)
        begin = first + (i - item) * ROWS
        rows = tl.maximum(tl.minimum(first + count - begin, ROWS), 0)
        mask = i < last_item
        tl.store(items_ptr + 3 * i, tl.zeros_like(i) + expert, mask=mask)
        tl.store(items_ptr + 3 * i + 1, begin, mask=mask)
        tl.store(items_ptr + 3 * i + 2, rows, mask=mask)


@triton.jit(do_not_specialize=["pairs", "num_items"])  # one compiled variant for every number of tokens
def _sort_kernel(
    chosen_ptr, order_ptr, inverse_ptr, items_ptr, ends_ptr, pairs, num_items,
    X: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program e: the pairs of expert e in order of the pairs, and its items (expert, first pair, number of pairs).

    The last one also gives pairs of no expert the place -1, and the end of `order`, which none of them takes, zeros.
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK_P)
    lower = tl.zeros((BLOCK_P,), tl.int32)
    equal = tl.zeros((BLOCK_P,), tl.int32)
    counts = tl.zeros((BLOCK_X,), tl.int32)
    for start in range(0, pairs, BLOCK_P):
        chosen = tl.load(chosen_ptr + start + lane, mask=start + lane < pairs, other=-1)
        chosen = tl.where(chosen < 0, X, chosen)  # above every expert
        lower += (chosen < expert).to(tl.int32)
        equal += (chosen == expert).to(tl.int32)
        counts += tl.histogram(chosen, BLOCK_X)
    first = tl.sum(lower, 0)
    count = tl.sum(equal, 0)
    tl.store(ends_ptr + expert, first + count)
    x = tl.arange(0, BLOCK_X)
    tiles = tl.where(x < X, (counts + ROWS - 1) // ROWS, 0)  # bin X holds the padding and the pairs of none
    item = tl.sum(tl.where(x < expert, tiles, 0), 0)
    last_item = item + (count + ROWS - 1) // ROWS
    if expert == X - 1:
        last_item = num_items  # clears what is left
    _store_items(items_ptr, expert, first, count, item, last_item, ROWS, BLOCK_I)
    before = first
    for start in range(0, pairs, BLOCK_P):
        pair = start + lane
        chosen = tl.load(chosen_ptr + pair, mask=pair < pairs, other=X)  # X: padding
        mine = (chosen == expert).to(tl.int32)
        position = before + tl.cumsum(mine, 0) - mine
        tl.store(order_ptr + position, pair, mask=mine != 0)
        tl.store(inverse_ptr + pair, position, mask=mine != 0)
        before += tl.sum(mine, 0)
        if expert == X - 1:
            tl.store(inverse_ptr + pair, tl.zeros_like(pair) - 1, mask=chosen < 0)
    if expert == X - 1:
        for start in range(before, pairs, BLOCK_P):
            tl.store(order_ptr + start + lane, tl.zeros_like(lane), mask=start + lane < pairs)


class SortedPairs(NamedTuple):
    """Pairs in order of their experts, int32."""

    order: torch.Tensor  # [P]; zeros behind the last expert's pairs
    inverse: torch.Tensor  # [P]: the place of each pair; -1: it has no expert
    items: torch.Tensor  # [n, 3]: expert, first place, number of pairs up to `rows`; those of no pairs come last
    ends: torch.Tensor  # [X]: the place behind each expert's last pair


def sort_pairs(chosen: torch.Tensor, num_experts: int, rows: int) -> SortedPairs:
    """Sort the pairs of chosen [T, k], experts of a token all different or -1, into items of up to `rows`."""
    tokens, k = chosen.shape
    pairs = tokens * k
    # an expert has at most a pair of every token
    num_items = min(pairs, num_experts if tokens <= rows else num_experts + pairs // rows)
    sizes = (pairs, pairs, 3 * num_items, num_experts)
    places = [-(-size // 4) * 4 for size in sizes]  # each begins on 16 bytes: one compiled variant for every size
    scratch = torch.empty(sum(places), dtype=torch.int32, device=chosen.device).split(places)
    order, inverse, flat, ends = (part[:size] for part, size in zip(scratch, sizes, strict=True))
    block = min(BLOCK, max(32, next_power_of_two(pairs)))
    _sort_kernel[(num_experts,)](
        chosen, order, inverse, flat, ends, pairs, num_items,
        X=num_experts, BLOCK_P=block, BLOCK_X=next_power_of_two(num_experts + 1), ROWS=rows, BLOCK_I=128,
        num_warps=8 if block >= 2048 else 4, **pdl(chosen.device),
    )  # fmt: skip
    return SortedPairs(order, inverse, flat.view(num_items, 3), ends)
