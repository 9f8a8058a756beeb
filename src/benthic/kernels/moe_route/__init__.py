"""Choose each token's experts and their weights."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.moe_route.reference import moe_route_reference


def moe_route(
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
    """Grouped top-k of sigmoid(logits) + bias -> experts int32 [T, k], best first, and weights float32 [T, k].

    logits float32 [T, X], bias float32 [X]. A group's score is the sum of its two largest; experts of all but the best
    `topk_groups` groups are out. The weights are the sigmoids without the bias, divided by their sum (plus 1e-20) if
    `norm`, times `scaling`. Of equals the lowest group or expert wins (arXiv:2412.19437, section 2.1.2). With `shared`
    a last column names expert X, with weight 1, for every token: [T, k + 1].
    """
    num_experts = logits.shape[1]
    if (
        bias.shape != (num_experts,)
        or num_experts % num_groups
        or not 1 <= topk_groups <= num_groups
        or not 1 <= k <= topk_groups * (num_experts // num_groups)
    ):
        raise ValueError(
            f"moe_route: logits {tuple(logits.shape)}, bias {tuple(bias.shape)}, {k} experts of {topk_groups} of "
            f"{num_groups} groups do not fit"
        )
    if use_triton(logits):
        from benthic.kernels.moe_route.kernel import moe_route_triton  # triton is optional

        route = moe_route_triton
    else:
        route = moe_route_reference
    return route(
        logits, bias, k=k, num_groups=num_groups, topk_groups=topk_groups, norm=norm, scaling=scaling, shared=shared
    )


__all__ = ["moe_route", "moe_route_reference"]
