"""Attention over latents of one of several context-parallel ranks; see `parallel.cp_split` for who has what.

What a layer exchanges, on every rank in this order, whatever rows it has itself:

    take_in   all-gather of context pages       where a prefill row has a context
              all-gather of new tokens' records where the step has prefill rows
    select    all-gather of candidates          on an indexing layer where a decode row passes K positions
    attend    all-gather of decode rows' parts  where the step has decode rows

On an indexing layer index keys travel with the latents: new ones always, the context's where a prefill row selects.
"""

from collections.abc import Iterator
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
from benthic.attention.latent import LatentBackend, LatentSpec, LayerNorms, Turn
from benthic.attention.latent_reading import all_positions, entry_floats, key_scores, read_keys, read_latents
from benthic.attention.page_records import PageRecords, index_records, latent_records
from benthic.attention.partial import OwnRows, Parts, own_bound, own_rows, row_blocks, takes_kernels
from benthic.attention.selection_merge import Candidates, num_candidates, own_positions
from benthic.common.layout import ceil_div, owner_of
from benthic.forward import ForwardBatch, RankBatch
from benthic.kernels.index_scores import index_scores_decode
from benthic.kernels.latent_decode import latent_decode_part
from benthic.kernels.topk_select import topk_select
from benthic.parallel.collectives import Collectives

_WIDTH = 1024  # scores' rows are whole multiples of this, so that kernels meet few strides


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one forward pass share."""

    batch: ForwardBatch
    ranks: RankBatch
    places: StepPlaces
    decode: tuple[OwnRows, ...]  # none for kernels: they take all rows at once, and nothing is copied from the host
    room: Room[LatentBackend]
    segments: ForwardBatch | None  # None: this rank has no prefill rows
    inner_metadata: Any
    selects_decode: bool  # replicated: a decode row passes K, else they attend to all positions
    selects_prefill: bool  # replicated: a prefill row passes K, on whatever rank

    @property
    def selects_segments(self) -> bool:
        """Whether one of this rank's own passes K. Nothing is exchanged for it."""
        return self.segments is not None and self.room.inner.needs_selection(self.inner_metadata)


class ShardedLatentBackend(LatentBackend):
    """Prefill rows by a backend of `kind` over a work pool, decode rows in parts over each rank's own pages.

    The parts come from the kernels of `decode` (None: `kind`) where it has some, else from plain torch.
    """

    name: ClassVar[str] = "sharded"

    def __init__(
        self,
        spec: LatentSpec,
        latents: torch.Tensor,
        index_keys: torch.Tensor | None,
        group: Collectives,
        kind: type[LatentBackend],
        decode: type[LatentBackend] | None = None,
    ) -> None:
        super().__init__(spec, latents, index_keys)
        self._by_kernels = takes_kernels(decode or kind)
        index = None if spec.index is None else replace(spec.index, num_layers=1)
        inner_spec = replace(spec, num_layers=1, index=index)
        self._group = group
        self._latent_records = latent_records(spec.page_size, latents.shape[-1] * latents.dtype.itemsize)
        self._index_records: PageRecords | None = None
        pools = [latents]
        if spec.index is not None:
            assert index_keys is not None
            itemsize = index_keys.dtype.itemsize
            self._index_records = index_records(spec.page_size, spec.index.head_dim, itemsize, spec.index.fp8)
            pools.append(index_keys)
        self._work = WorkPool(pools, lambda work: kind(inner_spec, work[0], work[1] if len(work) > 1 else None))
        self._step: _Step | None = None  # of the batch that came last, for `take_in`

    @classmethod
    def unsupported(cls, spec: LatentSpec) -> str | None:
        """None: its part was asked."""
        return None

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch) -> _Step:
        """See LatentBackend. Exchanges nothing."""
        ranks, size, index = batch.ranks, self.spec.page_size, self.spec.index
        assert ranks is not None
        assert not batch.in_graph, "an exchange between ranks is not captured"
        self._step = None  # it holds the old room, which may have to grow
        room = self._work.room(ranks.step.work_pages)
        segments = segments_batch(batch) if batch.num_tokens > batch.num_decode else None
        self._step = _Step(
            batch=batch,
            ranks=ranks,
            places=StepPlaces.of(batch, ranks, size),
            decode=() if self._by_kernels else own_rows(ranks, size),
            room=room,
            segments=segments,
            inner_metadata=None if segments is None else room.inner.begin(segments),
            selects_decode=index is not None and ranks.max_decode_len > index.topk,
            selects_prefill=index is not None and ranks.max_prefill_len > index.topk,
        )
        return self._step

    def needs_selection(self, metadata: _Step) -> bool:
        """See LatentBackend. The same on every rank."""
        return metadata.selects_decode or metadata.selects_prefill

    @torch.inference_mode()
    def take_in(
        self, layer: int, product: torch.Tensor, norms: LayerNorms, turn: Turn, batch: ForwardBatch
    ) -> torch.Tensor:
        """See LatentBackend. Also brings the context, and shares what is new."""
        step = self._step
        if step is None or step.batch is not batch:
            step = self.begin(batch)
        payloads = [LayerPayload(self._latent_records, self.latents[layer], step.room.pools[0])]
        if norms.index is not None:
            assert self.index_keys is not None
            assert self._index_records is not None
            keys = self.index_keys[norms.index.ordinal]
            payloads.append(LayerPayload(self._index_records, keys, step.room.pools[1]))
            norms = replace(norms, index=replace(norms.index, ordinal=0))
        bring_context(self._group, payloads if step.selects_prefill else payloads[:1], step.ranks)
        query = step.room.inner.take_in(0, product, norms, turn, batch)
        own = [payload.records.read(payload.work, step.places.own_work) for payload in payloads]
        share_records(self._group, payloads, own, step.ranks, step.places)
        return query

    @torch.inference_mode()
    def select(
        self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, metadata: _Step
    ) -> torch.Tensor:
        """See LatentBackend."""
        index, decode = self.spec.index, batch.num_decode
        assert index is not None
        selected = torch.full((len(queries), index.topk), -1, dtype=torch.int32, device=queries.device)
        if metadata.selects_decode:
            selected[:decode] = self._select_decode(ordinal, queries[:decode], weights[:decode], metadata)
        elif decode:
            selected[:decode] = all_positions(batch.seq_lens[:decode], index.topk)
        if metadata.selects_segments:
            segments = metadata.segments
            assert segments is not None
            selected[decode:] = metadata.room.inner.select(
                0, queries[decode:], weights[decode:], segments, metadata.inner_metadata
            )
        elif metadata.segments is not None:
            own = slice(decode, batch.num_tokens)
            selected[own] = all_positions(batch.positions[own] + 1, index.topk)
        return selected

    @torch.inference_mode()
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        selected: torch.Tensor | None,
        batch: ForwardBatch,
        metadata: _Step,
    ) -> torch.Tensor:
        """See LatentBackend."""
        decode = batch.num_decode
        out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        if decode:  # replicated
            chosen = selected[:decode] if selected is not None and metadata.selects_decode else None
            parts = self._parts(layer, q_latent[:decode], q_rope[:decode], chosen, metadata)
            out[:decode] = parts.merged(self._group)
        if metadata.segments is not None:  # exchanges nothing
            chosen = selected[decode:] if selected is not None and metadata.selects_segments else None
            out[decode:] = metadata.room.inner.attend(
                0, q_latent[decode:], q_rope[decode:], chosen, metadata.segments, metadata.inner_metadata
            )
        return out

    # --- decode rows --------------------------------------------------------------------------------------------------

    def _select_decode(self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, step: _Step) -> torch.Tensor:
        """int32 [D, K]; scores as those of the backend that computes the rows of one rank alone."""
        spec, index, group = self.spec, self.spec.index, self._group
        assert index is not None
        width = num_candidates(step.ranks.max_decode_len, spec.page_size, group.size, index.topk)
        found = Candidates(len(queries), width, spec.page_size, group, queries.device)
        score = self._score_by_kernels if self._by_kernels else self._score_by_torch
        for rows, scores, best in score(ordinal, queries, weights, width, step):
            found.put(rows, scores, best)
        return found.merged(index.topk)

    def _score_by_kernels(
        self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, width: int, step: _Step
    ) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]]:
        """Rows, scores [n, S] of this rank's tokens, the best of them [n, width]."""
        spec, ranks = self.spec, step.ranks
        assert self.index_keys is not None
        bound = own_bound(ranks.max_decode_len, spec.page_size, self._group.size)
        room = ceil_div(bound, _WIDTH) * _WIDTH
        for rows in row_blocks(len(queries), room * 4, queries.device):
            lens = ranks.decode_lens[rows]
            scores = torch.empty((len(lens), room), device=queries.device)
            index_scores_decode(
                queries[rows], weights[rows], self.index_keys[ordinal], ranks.decode_table[rows], lens, bound, scores
            )  # short rows too: their scores meet those of other ranks
            yield rows, scores, topk_select(scores, lens, width)

    def _score_by_torch(
        self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, width: int, step: _Step
    ) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]]:
        """As `_score_by_kernels`."""
        index = self.spec.index
        assert index is not None
        assert self.index_keys is not None
        queries, weights = queries.double(), weights.double()
        for rows in step.decode:
            for block in rows.blocks((index.head_dim + index.num_heads) * 8):
                keys = read_keys(self.index_keys[ordinal], block.pages, block.longest, self.spec)
                scores = key_scores(queries[block.rows], weights[block.rows], keys)
                few = block.longest <= width
                best = all_positions(block.lens, width) if few else topk_select(scores, block.lens, width)
                yield block.rows, scores, best

    def _parts(
        self, layer: int, q_latent: torch.Tensor, q_rope: torch.Tensor, selected: torch.Tensor | None, step: _Step
    ) -> Parts:
        """The decode rows over this rank's pages: all positions, or those selected [D, K]."""
        spec, ranks = self.spec, step.ranks
        if not self._by_kernels:
            return self._parts_by_torch(layer, q_latent, q_rope, selected, step)
        if selected is not None:
            selected = own_positions(selected, spec.page_size, self._group)
        # not the step's: the splits, and so the kernels, follow from its rows alone
        bound = own_bound(spec.max_seq_len, spec.page_size, self._group.size)
        out, lse = latent_decode_part(
            q_latent, q_rope, self.latents[layer], ranks.decode_table, ranks.decode_lens, selected, bound, spec.scale,
            rank=spec.rank,
        )  # fmt: skip
        return Parts.of(out, lse)

    def _parts_by_torch(
        self, layer: int, q_latent: torch.Tensor, q_rope: torch.Tensor, selected: torch.Tensor | None, step: _Step
    ) -> Parts:
        q = torch.cat((q_latent, q_rope), -1).float().mul_(self.spec.scale)
        parts = Parts.none(len(q), self.spec.num_heads, self.spec.rank, q.device)
        found = self._dense(layer, step) if selected is None else self._chosen(layer, selected, step)
        for rows, entries, hidden in found:
            keys = entries.unsqueeze(1)
            parts.put(rows, q[rows].unsqueeze(1), keys, keys[..., : self.spec.rank], hidden)
        return parts

    def _dense(self, layer: int, step: _Step) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Rows, entries float32 [n, S, W] of this rank's pages, which of them are hidden [n, S]."""
        width = self.spec.rank + self.spec.rope_dim
        for rows in step.decode:
            for block in rows.blocks(width * 4):
                entries = read_latents(self.latents[layer], block.pages, block.longest, self.spec.rank)
                yield block.rows, entries, block.hidden()

    def _chosen(
        self, layer: int, selected: torch.Tensor, step: _Step
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Rows, entries float32 [n, K, W] of the selected positions, hidden [n, K]: those on other ranks, and none."""
        size, group, table = self.spec.page_size, self._group, step.ranks.decode_table.long()
        pool = self.latents[layer]
        entries = pool.view(-1, pool.shape[-1])
        width = self.spec.rank + self.spec.rope_dim
        for rows in row_blocks(len(selected), selected.shape[1] * width * 4, pool.device):
            chosen = selected[rows].long()
            page = torch.div(chosen, size, rounding_mode="floor")  # of the row; -1 for none
            hidden = (chosen < 0) | (owner_of(page, group.size) != group.rank)  # type: ignore[arg-type]  # arrays too
            page = torch.div(page, group.size, rounding_mode="floor").masked_fill_(hidden, 0)  # here
            slots = table[rows].gather(1, page).mul_(size).add_(chosen % size)
            floats = entry_floats(entries.index_select(0, slots.flatten()), self.spec.rank)
            yield rows, floats.view(*slots.shape, -1), hidden
