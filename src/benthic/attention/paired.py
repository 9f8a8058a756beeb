"""Two backends over the same pools: one for steps with prefill rows, one for steps that only decode.

A step is never cut: decode rows beside a prefill go with it. Decode graphs hold the second backend alone.
"""

from typing import Any, NamedTuple

import torch

from benthic.attention.interface import AttentionBackend
from benthic.attention.latent import LatentBackend
from benthic.forward import ForwardBatch


class PairedBackend(AttentionBackend):
    """Grouped-query attention by two backends."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(prefill.spec, prefill.kv)
        self._prefill = prefill
        self._decode = decode

    @property
    def most_prompt_keys(self) -> int:
        """None: prompts go to the backend that was asked for, and it is not in the graphs."""
        return 0

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None: its parts were asked."""
        return None

    def begin(self, batch: ForwardBatch) -> Any:
        """See AttentionBackend."""
        return self._of(batch).begin(batch)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, metadata: Any
    ) -> torch.Tensor:
        """See AttentionBackend."""
        return self._of(batch).attend(layer, q, k, v, batch, metadata)

    def _of(self, batch: ForwardBatch) -> AttentionBackend:
        return self._decode if batch.num_tokens == batch.num_decode else self._prefill


class _Metadata(NamedTuple):
    backend: LatentBackend
    inner: Any


class PairedLatentBackend(LatentBackend):
    """Attention over latents by two backends."""

    def __init__(self, prefill: LatentBackend, decode: LatentBackend) -> None:
        super().__init__(prefill.spec, prefill.latents, prefill.index_keys)
        self._prefill = prefill
        self._decode = decode

    @property
    def most_prompt_keys(self) -> int:
        """None: prompts go to the backend that was asked for, and it is not in the graphs."""
        return 0

    @classmethod
    def unsupported(cls, spec: Any) -> str | None:
        """None: its parts were asked."""
        return None

    def begin(self, batch: ForwardBatch) -> _Metadata:
        """See LatentBackend."""
        backend = self._of(batch)
        return _Metadata(backend, backend.begin(batch))

    def needs_selection(self, metadata: _Metadata) -> bool:
        """See LatentBackend."""
        return metadata.backend.needs_selection(metadata.inner)

    def select(
        self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, metadata: _Metadata
    ) -> torch.Tensor:
        """See LatentBackend."""
        return metadata.backend.select(ordinal, queries, weights, batch, metadata.inner)

    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        selected: torch.Tensor | None,
        batch: ForwardBatch,
        metadata: _Metadata,
    ) -> torch.Tensor:
        """See LatentBackend."""
        return metadata.backend.attend(layer, q_latent, q_rope, selected, batch, metadata.inner)

    def _of(self, batch: ForwardBatch) -> LatentBackend:
        return self._decode if batch.num_tokens == batch.num_decode else self._prefill
