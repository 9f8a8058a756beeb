"""Multi-head latent attention (https://arxiv.org/abs/2405.04434) in its absorbed form: keys and values are the latents.

Letters: T tokens, D hidden size, Q the query latent's size, H heads, R the latent's rank, N and P the parts of a head's
query without and with rope, V a head's value, I and E the indexer's heads and their size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from benthic.attention.latent import LatentBackend, LayerNorms, Turn
from benthic.forward import ForwardBatch
from benthic.kernels.head_linear import head_linear
from benthic.kernels.query_rope import query_rope
from benthic.layers.entry import NOTHING, FirstProducts, Made
from benthic.layers.indexer import Indexer
from benthic.layers.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """One layer's weights. Products with the same input are one, their rows one after another."""

    inward: Linear  # D -> Q + R + P, and E where the layer indexes
    norms: LayerNorms
    queries: Linear  # Q -> H * (N + P), and I * E where the layer indexes
    keys: torch.Tensor  # [H, N, R]: what absorbs a head's query
    values: torch.Tensor  # [H, R, V]
    outward: Linear  # H * V -> D


class LatentAttention:
    """Attention of one layer, its cache writes and its selection included."""

    __slots__ = ("_indexer", "_nope", "_rope_dim", "_weights", "first")

    def __init__(self, weights: LatentWeights, rope_dim: int, indexer: Indexer | None) -> None:
        self._weights = weights
        self._nope = weights.keys.shape[1]
        self._rope_dim = rope_dim
        self._indexer = indexer
        self.first = FirstProducts(weights.inward, *((None, 1.0) if indexer is None else indexer.narrow()))

    def __call__(
        self,
        layer: int,
        x: torch.Tensor,
        turn: Turn,
        batch: ForwardBatch,
        attention: LatentBackend,
        metadata: Any,
        selected: torch.Tensor | None,
        made: Made = NOTHING,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Normalised x [T, D] -> [T, D] and the selection used: its own, or `selected` of a layer below.

        `made`: what there is of `first` already.
        """
        weights, hooks = self._weights, batch.hooks
        tokens, heads = len(x), len(weights.keys)
        size = self._nope + self._rope_dim
        product = weights.inward(x) if made.wide is None else made.wide
        if hooks is not None:
            hooks.before_layer(layer)
        product = weights.queries(attention.take_in(layer, product, weights.norms, turn, batch))
        q = product[:, : heads * size].view(tokens, heads, size)
        if self._indexer is not None and attention.needs_selection(metadata):
            selected, q_latent = self._indexer.select(
                x, product, size, weights.keys, turn, batch, attention, metadata, made.narrow
            )
        else:
            query_rope(q, turn.table, turn.positions, rope_dim=self._rope_dim)
            q_latent = head_linear(q[..., : self._nope], weights.keys)
        attended = attention.attend(layer, q_latent, q[..., self._nope :], selected, batch, metadata)
        if hooks is not None:
            hooks.after_layer(layer)
        values = torch.empty((tokens, heads, weights.values.shape[2]), dtype=x.dtype, device=x.device)
        head_linear(attended, weights.values, values)
        return weights.outward(values.view(tokens, -1)), selected
