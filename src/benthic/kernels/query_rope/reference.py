"""`query_rope` in plain torch."""

import torch

from benthic.kernels.latent_math import turn_rope


def query_rope_reference(q: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, *, rope_dim: int) -> None:
    """See `benthic.kernels.query_rope.query_rope`."""
    part = q[..., q.shape[-1] - rope_dim :]
    part.copy_(turn_rope(part, table, positions, interleaved=True))
