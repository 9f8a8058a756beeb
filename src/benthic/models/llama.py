"""Dense decoders with grouped-query attention: Llama, SmolLM2, Qwen2 and Qwen3. Only shapes and wiring.

Letters: T tokens, D hidden size, H query heads, G key/value heads, d head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benthic.attention.interface import AttentionBackend
from benthic.forward import ForwardBatch
from benthic.layers.linear import Linear
from benthic.layers.linear_sum import LinearSum
from benthic.layers.mlp import GatedMLP
from benthic.layers.norm import RMSNorm
from benthic.layers.rope import Angles, Rope
from benthic.weights.model_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One decoder layer. `qkv` has the rows of q, then k, then v; the norms of q and k are Qwen3's, per head."""

    attention_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Linear | LinearSum
    mlp_norm: RMSNorm
    mlp: GatedMLP


class LlamaModel:
    """The decoder: tokens to hidden states, and hidden states to logits. No state of its own beyond the weights.

    With tensor parallelism `config` is of this rank's part (`rank_shape.local_shape`): its heads, its MLP columns.
    Hidden states and logits are whole, and the same on every rank.
    """

    def __init__(
        self,
        config: LlamaConfig,
        embedding: torch.Tensor,
        layers: list[LlamaLayer],
        norm: RMSNorm,
        head: Linear,
        rope: Rope,
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.scale = config.head_dim**-0.5
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rope = rope

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, attention: AttentionBackend, metadata: Any) -> torch.Tensor:
        """Hidden states [T, D] after the final norm, model dtype; `metadata` is `attention.begin(batch)`. Writes KV."""
        residual = F.embedding(batch.input_ids, self._embedding)
        angles = self._rope.angles(batch.positions, self.dtype)
        hooks = batch.hooks
        added: torch.Tensor | None = None  # what the last block made, not yet in the residual stream
        for index, layer in enumerate(self._layers):
            norm = layer.attention_norm
            normed = norm(residual) if added is None else norm.after_add(added, residual)
            q, k, v = self._project(layer, normed, angles)
            if hooks is not None:
                hooks.before_layer(index)  # only attention touches KV
            attended = attention.attend(index, q, k, v, batch, metadata)
            if hooks is not None:
                hooks.after_layer(index)
            projected = layer.output(attended.reshape(len(residual), -1))
            added = layer.mlp(layer.mlp_norm.after_add(projected, residual))
        return self._norm(residual) if added is None else self._norm.after_add(added, residual)

    @torch.inference_mode()
    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, D] after the final norm -> logits float32 [n, vocabulary]."""
        return self._head(hidden_rows).float()

    def _project(
        self, layer: LlamaLayer, x: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, d], k and v [T, G, d] of normalised x [T, D], q and k turned."""
        heads, shared = self.config.num_heads, self.config.num_kv_heads
        projected = layer.qkv(x).view(len(x), heads + 2 * shared, self.config.head_dim)
        turning, v = projected[:, : heads + shared], projected[:, heads + shared :]
        if layer.q_norm is not None and layer.k_norm is not None:
            turning = torch.cat((layer.q_norm(turning[:, :heads]), layer.k_norm(turning[:, heads:])), 1)
        turned = self._rope.turn(turning, heads, angles)
        return turned[:, :heads], turned[:, heads:], v
