"""The results of a token's experts, one by one."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """What `experts` adds up in its last step, for a caller who has more to do with the sum."""

    partial: torch.Tensor  # [P, D] float32 or that dtype, of pairs of a token and an expert, in any order
    weights: torch.Tensor  # float32 [T, k]
    places: torch.Tensor  # int32 [T * k]: where in `partial` each pair is; -1: nowhere, it adds nothing
