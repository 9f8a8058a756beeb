"""The routed experts' gated MLPs, summed with their weights."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.experts.parts import ExpertParts
from benthic.kernels.experts.reference import experts_reference, sum_norm_reference


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum over j of weights[t, j] * down[e] (silu(gate[e] x[t]) * (up[e] x[t])), e = chosen[t, j] -> [T, D].

    x [T, D], any row stride; chosen int32 [T, k], experts of a token all different, or -1 for none (another rank's):
    no work, nothing added; weights float32 [T, k], finite; gate_up [X, 2W, D], gate rows first; down [X, D, W]; out of
    x's shape, contiguous, in x's dtype or in float32. Products in float32 sums, the activation rounded to x's dtype,
    the sum over j in float32 in the order of the columns. A shared expert is one more: stacked last, named in each
    token's last column with weight 1 (`moe_route(shared=True)`).
    """
    _check(x, chosen, weights, gate_up, down, out)
    if use_triton(x):
        from benthic.kernels.experts.kernel import experts_triton  # triton is optional

        return experts_triton(x, chosen, weights, gate_up, down, out)
    return experts_reference(x, chosen, weights, gate_up, down, out)


def experts_before_sum(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor | ExpertParts:
    """`experts`, or where the sum over j is a launch of its own what is left to be summed, for `sum_norm`."""
    if not use_triton(x) or len(x) <= 1:
        return experts(x, chosen, weights, gate_up, down)
    _check(x, chosen, weights, gate_up, down, None)
    from benthic.kernels.experts.kernel import expert_parts  # triton is optional

    return expert_parts(x, chosen, weights, gate_up, down)


def sum_norm(parts: ExpertParts, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    """`rms_norm` of the parts' sum, rounded to residual's dtype, with that residual [T, D], in one launch."""
    if residual.shape != (len(parts.weights), parts.partial.shape[1]) or weight.shape != residual.shape[1:]:
        raise ValueError(
            f"sum_norm: parts {tuple(parts.partial.shape)} of {len(parts.weights)} tokens, weight "
            f"{tuple(weight.shape)} and residual {tuple(residual.shape)} do not fit"
        )
    if use_triton(residual):
        from benthic.kernels.experts.summing.kernel import sum_norm_triton  # triton is optional

        return sum_norm_triton(parts, weight, eps, residual)
    return sum_norm_reference(parts, weight, eps, residual)


def _check(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    if (
        chosen.shape != weights.shape
        or chosen.shape[0] != x.shape[0]
        or gate_up.shape != (down.shape[0], 2 * down.shape[2], x.shape[1])
        or down.shape[1] != x.shape[1]
        or (out is not None and (out.shape != x.shape or not out.is_contiguous()))
    ):
        raise ValueError(
            f"experts: x {tuple(x.shape)}, chosen {tuple(chosen.shape)}, weights {tuple(weights.shape)}, gate_up "
            f"{tuple(gate_up.shape)}, down {tuple(down.shape)} or out do not fit"
        )


__all__ = ["ExpertParts", "experts", "experts_before_sum", "experts_reference", "sum_norm", "sum_norm_reference"]
