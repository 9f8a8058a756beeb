"""`silu_mul` in plain torch."""

import torch
import torch.nn.functional as F


def silu_mul_reference(both: torch.Tensor) -> torch.Tensor:
    """See `benthic.kernels.silu_mul.silu_mul`."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
