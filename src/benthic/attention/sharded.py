"""Grouped-query attention of one of several context-parallel ranks; see `parallel.cp_split` for who has what.

What a layer exchanges, on every rank in this order, whatever rows it has itself:

    all-gather of context pages      where a prefill row has a context
    all-gather of new tokens' K, V   where the step has prefill rows
    all-gather of decode rows' parts where the step has decode rows
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from benthic.attention.exchange import (
    LayerPayload,
    Room,
    StepPlaces,
    WorkPool,
    bring_context,
    segments_batch,
    share_records,
)
from benthic.attention.interface import AttentionBackend, AttentionSpec
from benthic.attention.page_records import grouped_records
from benthic.attention.partial import OwnRows, Parts, own_bound, own_rows, takes_kernels
from benthic.forward import ForwardBatch, RankBatch
from benthic.kernels.paged_decode import paged_decode_part
from benthic.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True)
class _Metadata:
    ranks: RankBatch
    places: StepPlaces
    decode: tuple[OwnRows, ...]  # none for kernels: they take all rows at once, and nothing is copied from the host
    room: Room[AttentionBackend]
    segments: ForwardBatch | None  # None: this rank has no prefill rows
    inner_metadata: Any


class ShardedBackend(AttentionBackend):
    """Prefill rows by a backend of `kind` over a work pool, decode rows in parts over each rank's own pages.

    The parts come from the kernels of `decode` (None: `kind`) where it has some, else from plain torch.
    """

    name: ClassVar[str] = "sharded"

    def __init__(
        self,
        spec: AttentionSpec,
        kv: torch.Tensor,
        group: Collectives,
        kind: type[AttentionBackend],
        decode: type[AttentionBackend] | None = None,
    ) -> None:
        super().__init__(spec, kv)
        self._by_kernels = takes_kernels(decode or kind)
        inner_spec = replace(spec, num_layers=1)
        self._group = group
        self._records = grouped_records(spec.page_size, spec.num_kv_heads, spec.head_dim, kv.dtype.itemsize)
        self._work = WorkPool([kv], lambda pools: kind(inner_spec, pools[0]))

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None: its part was asked."""
        return None

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch) -> _Metadata:
        """See AttentionBackend. Exchanges nothing."""
        ranks, decode = batch.ranks, batch.num_decode
        assert ranks is not None
        assert not batch.in_graph, "an exchange between ranks is not captured"
        room = self._work.room(ranks.step.work_pages)
        segments = segments_batch(batch) if batch.num_tokens > decode else None
        return _Metadata(
            ranks=ranks,
            places=StepPlaces.of(batch, ranks, self.spec.page_size),
            decode=() if self._by_kernels else own_rows(ranks, self.spec.page_size),
            room=room,
            segments=segments,
            inner_metadata=None if segments is None else room.inner.begin(segments),
        )

    @torch.inference_mode()
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, metadata: _Metadata
    ) -> torch.Tensor:
        """See AttentionBackend."""
        ranks, decode, rows = metadata.ranks, batch.num_decode, batch.num_tokens
        payloads = [LayerPayload(self._records, self.kv[layer], metadata.room.pools[0])]
        bring_context(self._group, payloads, ranks)
        own = torch.cat((k[:rows].flatten(1), v[:rows].flatten(1)), 1).view(torch.uint8)
        share_records(self._group, payloads, [own], ranks, metadata.places)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if decode:  # replicated
            out[:decode] = self._decode(layer, q[:decode], metadata).merged(self._group)
        if metadata.segments is not None:  # exchanges nothing
            own = metadata.room.inner.attend(
                0, q[decode:], k[decode:], v[decode:], metadata.segments, metadata.inner_metadata
            )
            out[decode:rows] = own[: rows - decode]  # padding rows stay zero
        return out

    def _decode(self, layer: int, q: torch.Tensor, metadata: _Metadata) -> Parts:
        """q [D, H, d] over this rank's pages."""
        if self._by_kernels:
            ranks, spec = metadata.ranks, self.spec
            # not the step's: the splits, and so the kernels, follow from its rows alone
            bound = own_bound(spec.max_seq_len, spec.page_size, self._group.size)
            return Parts.of(
                *paged_decode_part(q, self.kv[layer], ranks.decode_table, ranks.decode_lens, spec.scale, bound)
            )
        return self._decode_by_torch(layer, q, metadata.decode)

    def _decode_by_torch(self, layer: int, q: torch.Tensor, groups: tuple[OwnRows, ...]) -> Parts:
        spec, pool = self.spec, self.kv[layer]
        parts = Parts.none(len(q), spec.num_heads, spec.head_dim, q.device)
        scaled = (q.float() * spec.scale).view(len(q), spec.num_kv_heads, -1, spec.head_dim)
        for group in groups:
            for block in group.blocks(2 * spec.num_kv_heads * spec.head_dim * 4):
                pages = pool.index_select(0, block.pages.flatten()).float()
                # [n, M, 2, page_size, G, d] -> [2, n, G, M * page_size, d]
                pages = pages.view(*block.pages.shape, *pages.shape[1:]).permute(2, 0, 4, 1, 3, 5)
                keys, values = pages.flatten(3, 4)[..., : block.longest, :]
                parts.put(block.rows, scaled[block.rows], keys, values, block.hidden())
        return parts
