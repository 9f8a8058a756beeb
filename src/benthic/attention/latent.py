"""The interface of attention over latents (MLA, and DSA's selections): one key and value a token, shared by all heads.

Letters: T tokens, D decode rows, H heads, R the latent's rank, P the rope part, I index heads, E the index key's size,
K selected positions, L layers, X layers that index.

Pools, last page scratch (padded graph rows write there):

    latents      [L, pages + 1, page_size, R + P]   model dtype: normalised latent, then the turned rope part
                 uint8 [L, pages + 1, page_size, R + 4 * ceil(R / 128) + 2 * P]   fp8: R e4m3, a float32 scale per 128
                                                    latents (value = code * scale), P bfloat16
    index keys   [X, pages + 1, page_size, E]       model dtype
                 uint8 [X, pages + 1, page_size * (E + 4)]   fp8: the page's keys in e4m3, then a float32 scale a token

The rope part of latents is interleaved in the order of the weights: components 2i and 2i + 1 turn together.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from benthic.common.layout import ceil_div
from benthic.forward import ForwardBatch
from benthic.kernels.latent_step import IndexStep, latent_step
from benthic.kernels.query_step import Turned, query_step

SCALE_BLOCK = 128  # latents that share an fp8 scale


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """The lightning indexer: I heads of size E choose K positions. `fp8`: index keys (and queries) are e4m3."""

    num_layers: int  # X
    num_heads: int  # I
    head_dim: int  # E
    topk: int  # K
    fp8: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Shapes of absorbed latent attention. `fp8`: the latents are cached as e4m3. `index` None: always dense."""

    num_layers: int  # L
    num_heads: int  # H
    rank: int  # R
    rope_dim: int  # P
    scale: float
    page_size: int
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int  # longest context that will ever be asked for
    fp8: bool
    index: IndexSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The rope of a forward's tokens, for kernels: `table` float32 [max_position, P], P/2 cosines and then P/2 sines.

    Any amplitude of YaRN is in the table.
    """

    table: torch.Tensor
    positions: torch.Tensor  # int64 [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexNorm:
    """Of a layer that indexes, the `ordinal`-th: its keys' layer norm [E], and how their pairs turn."""

    ordinal: int
    weight: torch.Tensor
    bias: torch.Tensor
    interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """What a layer's first product passes through: RMS norms of the query latent [Q] and of the latent [R]."""

    query: torch.Tensor
    latent: torch.Tensor
    eps: float
    index: IndexNorm | None


def latent_bytes(rank: int, rope_dim: int, itemsize: int, fp8: bool) -> int:
    """Bytes of one token's latent in one layer."""
    if fp8:
        return rank + 4 * ceil_div(rank, SCALE_BLOCK) + 2 * rope_dim
    return (rank + rope_dim) * itemsize


class LatentBackend(ABC):
    """Causal attention of absorbed queries over paged latents, dense or over selected positions.

    A call sequence for a forward: `begin` once, then for each layer `take_in`, on an indexing layer where
    `needs_selection` also `turn_queries` and `select`, and then `attend`. All are capture-safe where batch.in_graph.
    """

    name: ClassVar[str]

    def __init__(self, spec: LatentSpec, latents: torch.Tensor, index_keys: torch.Tensor | None) -> None:
        self.spec = spec
        self.latents = latents
        self.index_keys = index_keys

    @property
    def most_prompt_keys(self) -> int:
        """See Attention: rows read the index keys of their contexts, and K latents; without an indexer all of them."""
        return 1 << 18 if self.spec.index is None else 1 << 23

    @classmethod
    @abstractmethod
    def unsupported(cls, spec: LatentSpec) -> str | None:
        """Why this backend can't run that, in words, or None."""

    @abstractmethod
    def begin(self, batch: ForwardBatch) -> Any:
        """Metadata for one forward pass (the same object goes to each layer)."""

    @abstractmethod
    def needs_selection(self, metadata: Any) -> bool:
        """Whether any row's context may pass K, so that `attend` wants a selection."""

    def take_in(
        self, layer: int, product: torch.Tensor, norms: LayerNorms, turn: Turn, batch: ForwardBatch
    ) -> torch.Tensor:
        """Keep the new tokens' latents, and index keys where the layer indexes, at batch.kv_slots; the query latent.

        product [T, Q + R + P (+ E)]: raw query latent, latent, rope part and index key. Returns the normed query latent
        [T, Q]. Latents are normed and their rope part turned, interleaved; index keys are layer-normed (eps 1e-6) and
        their FIRST P components turned, interleaved or half-split. Norms are taken in float32.
        """
        index = None
        if norms.index is not None:
            assert self.index_keys is not None
            index = IndexStep(
                weight=norms.index.weight,
                bias=norms.index.bias,
                keys=self.index_keys[norms.index.ordinal],
                page_size=self.spec.page_size,
                interleaved=norms.index.interleaved,
            )
        return latent_step(
            product, norms.query, norms.latent, norms.eps, turn.table, turn.positions, batch.kv_slots,
            self.latents[layer], rank=self.spec.rank, index=index,
        )  # fmt: skip

    def turn_queries(
        self,
        product: torch.Tensor,
        weights: torch.Tensor,
        head_dim: int,
        interleaved: bool,
        turn: Turn,
        keys: torch.Tensor | None = None,
    ) -> Turned:
        """Turn attention's queries, in place, and the indexer's: columns of product [T, H * (N + P) + I * E].

        weights float32 [T, I] have every constant factor in them (I^-0.5 and E^-0.5); `head_dim` is N + P. Returns
        what `select` takes: index queries [T, I, E] (e4m3 where keys are) and weights (with the queries' scales); and
        with `keys` [H, N, R], which absorb a head's query, what `attend` takes.
        """
        assert self.spec.index is not None
        return query_step(
            product, weights, turn.table, turn.positions, num_heads=self.spec.num_heads, head_dim=head_dim,
            rope_dim=self.spec.rope_dim, interleaved=interleaved, fp8=self.spec.index.fp8, keys=keys,
        )  # fmt: skip

    @abstractmethod
    def select(
        self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, metadata: Any
    ) -> torch.Tensor:
        """The K best positions of each token: int32 [T, K], logical, no repetition, valid ones first, -1 behind.

        queries [T, I, E] and weights float32 [T, I] are `turn_queries`' results. score(t, s) = sum over i of
        weights[t, i] * relu(queries[t, i] . key[s]) for s up to t's position. Of equal scores the lowest position wins.
        A token with at most K positions gets all.
        """

    @abstractmethod
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        selected: torch.Tensor | None,
        batch: ForwardBatch,
        metadata: Any,
    ) -> torch.Tensor:
        """softmax(scale * (q_latent . latent + q_rope . rope)) . latent over the allowed positions -> [T, H, R].

        q_latent [T, H, R] absorbed, q_rope [T, H, P] turned, any strides but contiguous last dimensions. `selected`
        is `select`'s result (of this layer or of one below that it shares with), None: every position up to its own.
        """
