"""`moe_route` in plain torch."""

import math

import torch


def moe_route_reference(
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
    scores = logits.float().sigmoid()
    choice = scores + bias
    if topk_groups < num_groups:
        groups = choice.view(tokens, num_groups, num_experts // num_groups)
        group_scores = groups.topk(min(2, groups.shape[2]), -1).values.sum(-1)
        closed = _best(group_scores, num_groups)[:, topk_groups:]
        choice = groups.scatter(1, closed.unsqueeze(-1).expand(-1, -1, groups.shape[2]), -math.inf).flatten(1)
    experts = _best(choice, k)
    weights = scores.gather(1, experts)
    if norm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * scaling
    if shared:
        experts = torch.cat([experts, experts.new_full((tokens, 1), num_experts)], 1)
        weights = torch.cat([weights, weights.new_ones((tokens, 1))], 1)
    return experts.to(torch.int32), weights


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]  # topk has no rule for equals
