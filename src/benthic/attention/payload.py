"""What a page of the KV cache is made of, as plain data: attention writes it, the tiers keep and move it."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Payload:
    """One kind of per-page state. A slice is one page of one layer: `slice_shape` numbers of `dtype`, contiguous."""

    name: str  # target_kv or index_k
    layers: tuple[int, ...]  # of the model, rising: those that compute the payload's own layers
    slice_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def slice_bytes(self) -> int:
        """Of a page in one layer."""
        return math.prod(self.slice_shape) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Of a page in all its layers."""
        return len(self.layers) * self.slice_bytes
