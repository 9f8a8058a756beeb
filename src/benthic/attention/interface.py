"""The interface of a grouped-query attention backend, and what it needs to know of a model.

Backends register by name in `choice.py`; attention over latents has its own interface, in `latent.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from benthic.forward import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shapes of grouped-query attention: H query heads share G key/value heads."""

    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int
    scale: float
    page_size: int
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int  # longest context that will ever be asked for


class Attention(Protocol):
    """What everybody but the model needs of a backend; the model calls it as the interface of its own family."""

    @property
    def most_prompt_keys(self) -> int:
        """Positions that a step's prompt tokens may see in sum for decode rows of a graph to be the cheaper way."""

    def begin(self, batch: ForwardBatch) -> Any:
        """Metadata for one forward pass (the same object goes to each layer). Capture-safe when batch.in_graph."""


class AttentionBackend(ABC):
    """Causal attention over a paged KV pool.

    The pool is `kv`: [layers, pages + 1, 2, page_size, G, head_dim]; the last page is scratch (padded graph rows
    write there). A call sequence for a forward: `begin` once, then for each layer `attend`, which first writes the
    new tokens' K and V.
    """

    name: ClassVar[str]

    def __init__(self, spec: AttentionSpec, kv: torch.Tensor) -> None:
        self.spec = spec
        self.kv = kv

    @property
    def most_prompt_keys(self) -> int:
        """See Attention: each row reads its own context, 64 tokens of a page at 4k."""
        return 1 << 18

    @classmethod
    @abstractmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this backend can't run there, in words, or None."""

    @abstractmethod
    def begin(self, batch: ForwardBatch) -> Any:
        """Metadata for one forward pass (the same object goes to each layer). Capture-safe when batch.in_graph."""

    @abstractmethod
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, metadata: Any
    ) -> torch.Tensor:
        """Write k, v [T, G, head_dim] at batch.kv_slots, then attend q [T, H, head_dim] -> [T, H, head_dim].

        Token t of a row at position p sees the row's positions 0..p. q, k have rope applied.
        """
