"""`greedy_pick` in Triton: the best of each BLOCK of a row, then the best of those. Limit: contiguous rows.

torch's argmax gives a long row to few programs: 16 µs for 65,536 logits, the same for one row as for 64.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two

BLOCK = 4096


@triton.jit
def _best_kernel(logits_ptr, best_ptr, where_ptr, stride, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2**31 for many rows of a large vocabulary
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits_ptr + row * stride + token, mask=token < V, other=float("-inf"))
    best, where = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + part
    tl.store(best_ptr + place, best)
    tl.store(where_ptr + place, part * BLOCK + where)


@triton.jit
def _pick_kernel(
    best_ptr, where_ptr, slots_ptr, tokens_ptr, last_ptr, PARTS, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    values = tl.load(best_ptr + row * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
    _best, part = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(where_ptr + row * PARTS + part).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    tl.store(last_ptr + tl.load(slots_ptr + row), token)


def greedy_pick_triton(
    logits: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor
) -> None:
    """See `benthic.kernels.greedy_pick.greedy_pick`."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    assert logits.stride(-1) == slots.stride(0) == tokens.stride(0) == last_tokens.stride(0) == 1, "contiguous"
    block = min(BLOCK, next_power_of_two(vocabulary))
    parts = triton.cdiv(vocabulary, block)
    best = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    launch = pdl(logits.device)
    _best_kernel[(rows, parts)](logits, best, where, logits.stride(0), vocabulary, BLOCK=block, num_warps=8, **launch)
    _pick_kernel[(rows,)](
        best, where, slots, tokens, last_tokens, parts, BLOCK=next_power_of_two(parts), num_warps=1, **launch
    )
