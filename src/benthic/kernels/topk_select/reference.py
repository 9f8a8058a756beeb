"""`topk_select` in plain torch."""

import torch

_ROWS = 64  # at once; bounds what sorting takes


def topk_select_reference(scores: torch.Tensor, lens: torch.Tensor, k: int, out: torch.Tensor) -> torch.Tensor:
    """See `benthic.kernels.topk_select.topk_select`: a stable sort, the best first; never reads the lengths back."""
    num_rows, width = scores.shape
    rank = torch.arange(max(k, width), device=scores.device)
    for start in range(0, num_rows, _ROWS):
        length = lens[start : start + _ROWS, None]
        part = scores[start : start + _ROWS]
        outside = rank[:width] >= length
        # what is outside may hold anything: as NaN it sorts behind everything, -inf included
        order = torch.where(outside, float("nan"), -part).sort(dim=1, stable=True).indices
        best = torch.full((len(part), k), -1, dtype=torch.int32, device=scores.device)
        best[:, :width] = order[:, :k].to(torch.int32)
        best = torch.where(length <= k, rank[:k].to(torch.int32), best)
        out[start : start + _ROWS] = torch.where(rank[:k] < length, best, -1)
    return out
