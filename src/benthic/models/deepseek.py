"""Decoders with latent attention, a lightning indexer and experts: GLM-5, DeepSeek-V3 and V3.2. Only shapes and wiring.

Letters: T tokens, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benthic.attention.latent import LatentBackend, Turn
from benthic.forward import ForwardBatch
from benthic.kernels.experts import ExpertParts
from benthic.layers.entry import enter
from benthic.layers.linear import Linear
from benthic.layers.mla import LatentAttention
from benthic.layers.mlp import GatedMLP
from benthic.layers.moe import MoE
from benthic.layers.norm import RMSNorm
from benthic.weights.dsa_config import DsaConfig


@dataclass(frozen=True, slots=True)
class DeepseekLayer:
    """One decoder layer."""

    attention_norm: RMSNorm
    attention: LatentAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP | MoE


class DeepseekModel:
    """The decoder: tokens to hidden states, and hidden states to logits. No state of its own beyond the weights."""

    def __init__(
        self,
        config: DsaConfig,
        embedding: torch.Tensor,
        layers: tuple[DeepseekLayer, ...],
        norm: RMSNorm,
        head: Linear,
        rope_table: torch.Tensor,
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.layers = layers
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._rope_table = rope_table

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, attention: LatentBackend, metadata: Any) -> torch.Tensor:
        """Hidden states [T, D] after the final norm, model dtype; `metadata` is `attention.begin(batch)`. Writes KV."""
        residual = F.embedding(batch.input_ids, self._embedding)
        turn = Turn(table=self._rope_table, positions=batch.positions)
        added: torch.Tensor | ExpertParts | None = None  # what the last block made, not yet in the residual stream
        selected: torch.Tensor | None = None  # of the nearest indexing layer, for those above it that have none
        for index, layer in enumerate(self.layers):
            x, residual, made = enter(layer.attention_norm, layer.attention.first, added, residual)
            projected, selected = layer.attention(index, x, turn, batch, attention, metadata, selected, made)
            mlp = layer.mlp
            x, residual, made = enter(layer.mlp_norm, mlp.first if isinstance(mlp, MoE) else None, projected, residual)
            added = mlp(x, batch, made) if isinstance(mlp, MoE) else mlp(x)
        return self._norm(residual) if added is None else self._norm.after_add(added, residual)

    @torch.inference_mode()
    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, D] after the final norm -> logits float32 [n, vocabulary]."""
        return self._head(hidden_rows).float()
