"""Write new tokens' K and V into one layer of the paged pool."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.paged_write.reference import paged_write_reference


def paged_write(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """kv[slot // page_size, 0 | 1, slot % page_size] = k | v for each token.

    kv [pages + 1, 2, page_size, G, head_dim], changed in place; k, v [T, G, head_dim], any strides; slots int64 [T] in
    0 … (pages + 1) * page_size - 1 (not checked: that would read the device). Values are converted to kv's dtype.
    """
    if k.shape != v.shape or k.shape[1:] != kv.shape[3:] or slots.shape != k.shape[:1]:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)} do not fit kv {tuple(kv.shape)}"
        )
    if use_triton(kv):
        from benthic.kernels.paged_write.kernel import paged_write_triton  # triton is optional

        paged_write_triton(kv, k, v, slots)
    else:
        paged_write_reference(kv, k, v, slots)


__all__ = ["paged_write", "paged_write_reference"]
