"""The lightning indexer of a layer: which positions its attention may look at (DeepSeek sparse attention).

Its wide products are columns of those that attention makes anyway; here is what is left.
"""

import torch

from benthic.attention.latent import IndexNorm, LatentBackend, Turn
from benthic.forward import ForwardBatch
from benthic.kernels.narrow_linear import narrow_linear


class Indexer:
    """One layer's: `keys` says how its keys are kept, `head_weights` [I, D] give each head's say in the score."""

    __slots__ = ("_factor", "_head_weights", "keys")

    def __init__(self, keys: IndexNorm, head_weights: torch.Tensor) -> None:
        self.keys = keys
        self._head_weights = head_weights
        self._factor = (len(head_weights) * len(keys.weight)) ** -0.5

    def narrow(self) -> tuple[torch.Tensor, float]:
        """What its weights are made with: [I, D], and a factor."""
        return self._head_weights, self._factor

    def select(
        self,
        x: torch.Tensor,
        product: torch.Tensor,
        head_dim: int,
        keys: torch.Tensor,
        turn: Turn,
        batch: ForwardBatch,
        attention: LatentBackend,
        metadata: object,
        weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [T, K] for normalised x [T, D], and attention's queries [T, H, R], absorbed by `keys` [H, N, R].

        Turns all queries of product [T, H * head_dim + I * E] in place. `weights` float32 [T, I], where they are made
        already: the product of x with `narrow`.
        """
        if weights is None:
            weights = narrow_linear(x, self._head_weights, self._factor)
        turned = attention.turn_queries(product, weights, head_dim, self.keys.interleaved, turn, keys)
        assert turned.latent is not None
        return attention.select(self.keys.ordinal, turned.queries, turned.weights, batch, metadata), turned.latent
