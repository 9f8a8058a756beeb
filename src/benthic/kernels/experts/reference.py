"""`experts` in plain torch: the tokens of each expert that was chosen, one expert after another."""

import torch

from benthic.kernels.experts.parts import ExpertParts
from benthic.kernels.rms_norm.reference import rms_norm_reference


def experts_reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.experts.experts`."""
    tokens, k = chosen.shape
    flat = chosen.reshape(-1).long()
    none, *sizes = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
    order = flat.argsort(stable=True)[none:]
    gathered = x.index_select(0, order // k)
    # in the order of (token, column), so that the sum's order is fixed; zeros for pairs of no expert
    partial = (x.new_zeros if none else x.new_empty)((tokens * k, x.shape[1]))
    start = 0
    for expert, size in enumerate(sizes):
        if size == 0:
            continue
        rows = slice(start, start + size)
        gate, up = (gathered[rows] @ gate_up[expert].T).chunk(2, -1)
        activated = torch.nn.functional.silu(gate.float()) * up.float()
        partial.index_copy_(0, order[rows], activated.to(x.dtype) @ down[expert].T)
        start += size
    summed = torch.bmm(weights.unsqueeze(1), partial.view(tokens, k, x.shape[1]).float()).squeeze(1)
    return summed.to(x.dtype) if out is None else out.copy_(summed)


def sum_norm_reference(parts: ExpertParts, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    """See `benthic.kernels.experts.sum_norm`."""
    places = parts.places.view(parts.weights.shape).long()
    partial = parts.partial.float()[places.clamp_min(0)] * (places >= 0).unsqueeze(-1)
    summed = (partial * parts.weights.unsqueeze(-1)).sum(1)
    return rms_norm_reference(summed.to(residual.dtype), weight, eps, residual)
