"""The positions of the k largest scores of each row, exactly."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.topk_select.cpu import topk_select_cpu
from benthic.kernels.topk_select.reference import topk_select_reference


def topk_select(scores: torch.Tensor, lens: torch.Tensor, k: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Positions of the k largest of scores[n, :lens[n]], of equal ones the lowest; int32 [n, k].

    scores float32 [n, S], unit last stride, free of NaN within the lengths (-inf is a score; -0 equals 0); lens int32
    [n], at most S. A row with lens <= k gets 0 .. lens - 1, and -1 behind. A longer row's positions come in an order
    that its scores and the plan's sizes decide (few rows or many, S), never what other rows hold. Sizes follow from
    shapes: fit for CUDA graphs.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32 or lens.shape != scores.shape[:1] or k < 1:
        raise ValueError(
            f"scores {tuple(scores.shape)} ({scores.dtype}), lens {tuple(lens.shape)} and k {k} do not fit"
        )
    out = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device) if out is None else out
    if out.shape != (scores.shape[0], k) or out.dtype != torch.int32:
        raise ValueError(f"out {tuple(out.shape)} ({out.dtype}) is not int32 ({scores.shape[0]}, {k})")
    if use_triton(scores):
        from benthic.kernels.topk_select.kernel import topk_select_triton  # triton is optional

        return topk_select_triton(scores, lens, k, out)
    if scores.device.type == "cpu":
        return topk_select_cpu(scores, lens, k, out)
    return topk_select_reference(scores, lens, k, out)


__all__ = ["topk_select", "topk_select_cpu", "topk_select_reference"]
