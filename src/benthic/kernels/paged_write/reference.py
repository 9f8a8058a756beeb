"""`paged_write` in plain torch."""

import torch


def paged_write_reference(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See `benthic.kernels.paged_write.paged_write`."""
    page, offset = slots // kv.shape[2], slots % kv.shape[2]
    kv[page, 0, offset] = k.to(kv.dtype)
    kv[page, 1, offset] = v.to(kv.dtype)
