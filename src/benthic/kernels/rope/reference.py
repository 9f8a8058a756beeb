"""`rope` in plain torch."""

import torch


def rope_reference(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """See `benthic.kernels.rope.rope`."""
    half = cos_sin.shape[1] // 2
    rows = cos_sin[positions].unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    for x in (q, k):
        low, high = x[..., : 2 * half].to(torch.float32, copy=True).tensor_split(2, dim=-1)
        x[..., :half] = (low * cos - high * sin).to(x.dtype)
        x[..., half : 2 * half] = (high * cos + low * sin).to(x.dtype)
