"""`moe_route` in Triton: one warp a token, its experts in registers as [groups, experts of a group]."""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import next_power_of_two


@triton.jit
def _lowest_best(score, index):
    """The lowest of `index` at which `score` [A, B] is greatest, over both dimensions."""
    return tl.min(tl.min(tl.where(score == tl.max(tl.max(score, 1), 0), index, 1 << 30), 1), 0)


@triton.jit
def _open_groups(choice, TOPK: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):
    """Which rows of `choice` [BLOCK_G, BLOCK_S] are among the best by the sum of their two largest: [BLOCK_G]."""
    place = tl.arange(0, BLOCK_S)[None, :]
    largest = tl.max(choice, 1)
    first = tl.min(tl.where(choice == largest[:, None], place, BLOCK_S), 1)
    second = tl.max(tl.where(place == first[:, None], float("-inf"), choice), 1)
    score = tl.where(second > float("-inf"), largest + second, largest)  # a group of one has no second
    group = tl.arange(0, BLOCK_G)
    score = tl.where(group < G, score, float("-inf"))
    mine, other = score[:, None], score[None, :]
    ahead = (other > mine) | ((other == mine) & (group[None, :] < group[:, None]))
    return tl.sum(ahead.to(tl.int32), 1) < TOPK


@triton.jit
def _moe_route_kernel(
    logits_ptr, bias_ptr, experts_ptr, weights_ptr, stride_t, scaling,
    X: tl.constexpr, G: tl.constexpr, TOPK_GROUPS: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = X // G
    group = tl.arange(0, BLOCK_G)[:, None]
    place = tl.arange(0, BLOCK_S)[None, :]
    index = group * SIZE + place
    mask = (group < G) & (place < SIZE)  # both are padded to powers of two
    bias = tl.load(bias_ptr + index, mask=mask, other=0.0)
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + token * stride_t + index, mask=mask, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logits))
    choice = tl.where(mask, score + bias, float("-inf"))
    if TOPK_GROUPS < G:
        is_open = _open_groups(choice, TOPK_GROUPS, G, BLOCK_G, BLOCK_S)
        choice = tl.where(is_open[:, None], choice, float("-inf"))
    column = tl.arange(0, BLOCK_K)
    experts = tl.full((BLOCK_K,), X, tl.int32)  # the shared expert's, if there is one, stays
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for j in tl.static_range(K):
        best = tl.minimum(_lowest_best(choice, index), X - 1)  # of NaN scores none is greatest: stay in range
        experts = tl.where(column == j, best, experts)
        weight = tl.sum(tl.sum(tl.where(index == best, score, 0.0), 1), 0)
        weights = tl.where(column == j, weight, weights)
        choice = tl.where(index == best, float("-inf"), choice)
    if NORM:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights = weights * scaling
    columns: tl.constexpr = K + SHARED
    if SHARED:
        weights = tl.where(column == K, 1.0, weights)
    tl.store(experts_ptr + token * columns + column, experts, mask=column < columns)
    tl.store(weights_ptr + token * columns + column, weights, mask=column < columns)


def moe_route_triton(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    k: int,
    num_groups: int,
    topk_groups: int,
    norm: bool,
    scaling: float,
    shared: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `benthic.kernels.moe_route.moe_route`."""
    tokens, num_experts = logits.shape
    experts = torch.empty((tokens, k + shared), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k + shared), dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return experts, weights
    assert logits.stride(-1) == bias.stride(-1) == 1, "rows are contiguous"
    _moe_route_kernel[(tokens,)](
        logits, bias, experts, weights, logits.stride(0), scaling,
        X=num_experts, G=num_groups, TOPK_GROUPS=topk_groups, K=k, NORM=norm, SHARED=int(shared),
        BLOCK_G=next_power_of_two(num_groups), BLOCK_S=next_power_of_two(num_experts // num_groups),
        BLOCK_K=next_power_of_two(k + shared), num_warps=1, **pdl(logits.device),
    )  # fmt: skip
    return experts, weights
