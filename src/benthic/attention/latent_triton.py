"""The GPU's backend of attention over latents: kernels for the cache writes, the indexer and attention itself.

Decode rows go through kernels whose launches depend on shapes and static bounds alone, so graphs can hold them.
Prefill rows are few, and go one after another. A row's tokens up to position K - 1 attend to everything before them and
need no scores: they are a stretch of their own, dense, so that the first K tokens of a prompt cost no selection.
Scores exist in passes of at most SCORE_BYTES, whatever the context. Of an fp8 cache, a row whose queries read its
context more than once over has that turned into numbers first: one scratch copy at a time, of one layer and row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from benthic.attention.latent import LatentBackend, LatentSpec
from benthic.attention.latent_reading import all_positions
from benthic.common.layout import ceil_div
from benthic.forward import ForwardBatch
from benthic.kernels.choice import has_triton
from benthic.kernels.index_scores import index_scores_decode, index_scores_prefill, queries_per_pass
from benthic.kernels.latent_decode import latent_decode
from benthic.kernels.latent_prefill import latent_prefill
from benthic.kernels.latent_unpack import latent_unpack
from benthic.kernels.topk_select import topk_select

SCORE_BYTES = 256 << 20  # of scores that exist at once
_WIDTH = 1024  # scores' rows are whole multiples of this, so that kernels meet few strides
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive tokens start … end - 1 of one prefill row, the first at `first_position` of its sequence."""

    start: int
    end: int
    first_position: int
    dense: bool  # every token sees at most K positions

    @property
    def num_keys(self) -> int:
        """What its last token sees."""
        return self.first_position + self.end - self.start


@dataclass(frozen=True, slots=True)
class _Row:
    """One prefill row."""

    pages: torch.Tensor  # int32 [M]
    num_keys: int  # its context after the step
    reads: int  # keys that its queries attend to, all together
    stretches: tuple[_Stretch, ...]

    @property
    def worth_unpacking(self) -> bool:
        """Whether its fp8 context had better be turned into numbers once: to read codes costs four times as much."""
        return self.reads > self.num_keys


@dataclass(frozen=True, slots=True)
class LatentMetadata:
    """The batch's decode rows, and its prefill rows with their stretches, once a forward."""

    decode_tables: torch.Tensor  # int32 [D, M]
    decode_lens: torch.Tensor  # int32 [D]
    decode_bound: int  # of decode_lens; up to K decode is dense, whatever the other rows are
    rows: tuple[_Row, ...]  # of prefill
    lens: torch.Tensor | None  # int32 [T], positions that each token sees; None: nothing is selected


class TritonLatentBackend(LatentBackend):
    """Latent attention in Triton, with a lightning indexer or without; usable inside CUDA graphs."""

    name: ClassVar[str] = "triton"

    @classmethod
    def unsupported(cls, spec: LatentSpec) -> str | None:
        """Why this backend can't run that, in words, or None."""
        if spec.device.type != "cuda":
            return f"the triton attention backend needs a CUDA device, not {spec.device.type}"
        if not has_triton():
            return "the triton package is not installed; install benthic[gpu]"
        if spec.dtype not in _DTYPES:
            return f"the triton attention backend computes in float32, bfloat16 or float16, not {spec.dtype}"
        if spec.page_size & (spec.page_size - 1):
            return f"page size {spec.page_size} is not a power of two"
        capability = torch.cuda.get_device_capability(spec.device)
        name = ".".join(map(str, capability))
        if capability < (8, 0):
            return f"the triton attention backend needs compute capability 8.0 or newer, this device has {name}"
        if capability < (8, 9) and (spec.fp8 or (spec.index is not None and spec.index.fp8)):
            return f"an fp8 cache needs compute capability 8.9 or newer, this device has {name}; take --kv-dtype model"
        return None

    def begin(self, batch: ForwardBatch) -> LatentMetadata:
        """See LatentBackend.begin. Inside a graph there are only decode rows, and nothing is read from the host."""
        decode = batch.num_decode
        return LatentMetadata(
            decode_tables=batch.page_table[:decode],
            decode_lens=batch.seq_lens[:decode],
            decode_bound=batch.max_seq_len if batch.in_graph else max(batch.seq_lens_host[:decode], default=0),
            rows=tuple(self._rows(batch)),
            lens=(batch.positions + 1).to(torch.int32) if self._selects(batch) else None,
        )

    def needs_selection(self, metadata: LatentMetadata) -> bool:
        """See LatentBackend.needs_selection."""
        return metadata.lens is not None

    def select(
        self,
        ordinal: int,
        queries: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
        metadata: LatentMetadata,
    ) -> torch.Tensor:
        """See LatentBackend.select."""
        index, keys = self.spec.index, self._keys(ordinal)
        assert index is not None
        assert metadata.lens is not None
        selected = torch.empty((len(queries), index.topk), dtype=torch.int32, device=queries.device)
        if len(queries) > batch.num_tokens:
            selected[batch.num_tokens :] = -1  # rows of padding
        if metadata.decode_bound > index.topk:
            self._select_decode(queries, weights, keys, metadata, selected)
        elif batch.num_decode:
            selected[: batch.num_decode] = all_positions(metadata.decode_lens, index.topk)
        for row in metadata.rows:
            for stretch in row.stretches:
                tokens = slice(stretch.start, stretch.end)
                if stretch.dense:
                    selected[tokens] = all_positions(metadata.lens[tokens], index.topk)
                else:
                    self._select_stretch(queries, weights, keys, row.pages, stretch, metadata.lens, selected)
        return selected

    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        selected: torch.Tensor | None,
        batch: ForwardBatch,
        metadata: LatentMetadata,
    ) -> torch.Tensor:
        """See LatentBackend.attend."""
        spec, pool, decode = self.spec, self.latents[layer], batch.num_decode
        dense_decode = selected is None or (spec.index is not None and metadata.decode_bound <= spec.index.topk)
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        if len(out) > batch.num_tokens:
            out[batch.num_tokens :] = 0  # rows of padding
        if decode:
            latent_decode(
                q_latent[:decode],
                q_rope[:decode],
                pool,
                metadata.decode_tables,
                metadata.decode_lens,
                None if selected is None or dense_decode else selected[:decode],
                spec.max_seq_len,  # not the batch's: the parts, and so the kernels, follow from its rows alone
                spec.scale,
                out[:decode],
                rank=spec.rank,
            )
        for row in metadata.rows:
            self._attend_row(pool, row, q_latent, q_rope, selected, out)
        return out

    # --- parts --------------------------------------------------------------------------------------------------------

    def _keys(self, ordinal: int) -> torch.Tensor:
        assert self.index_keys is not None
        return self.index_keys[ordinal]

    def _attend_row(
        self,
        pool: torch.Tensor,
        row: _Row,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        selected: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        spec, latents, pages = self.spec, pool, row.pages
        if spec.fp8 and row.worth_unpacking:
            latents = latent_unpack(pool, pages, row.num_keys, q_latent.dtype, rank=spec.rank)
            pages = torch.arange(len(latents), dtype=torch.int32, device=pool.device)
        for stretch in row.stretches:
            tokens = slice(stretch.start, stretch.end)
            latent_prefill(
                q_latent[tokens],
                q_rope[tokens],
                latents,
                pages,
                stretch.first_position,
                None if selected is None or stretch.dense else selected[tokens],
                spec.scale,
                out[tokens],
                rank=spec.rank,
            )

    def _selects(self, batch: ForwardBatch) -> bool:
        if self.spec.index is None:
            return False
        longest = batch.max_seq_len if batch.in_graph else max(batch.seq_lens_host, default=0)
        return longest > self.spec.index.topk

    def _rows(self, batch: ForwardBatch) -> Iterator[_Row]:
        limit = None if self.spec.index is None else self.spec.index.topk
        start = batch.num_decode
        lens = batch.seq_lens_host[batch.num_decode :]
        for row, (count, length) in enumerate(zip(batch.query_lens_host, lens, strict=True), batch.num_decode):
            first = length - count
            dense = count if limit is None else min(count, max(0, limit - first))
            stretches = (
                _Stretch(start, start + dense, first, True),
                _Stretch(start + dense, start + count, first + dense, False),
            )
            yield _Row(
                pages=batch.page_table[row],
                num_keys=length,
                reads=dense * (2 * first + dense + 1) // 2 + (count - dense) * (limit or 0),
                stretches=tuple(stretch for stretch in stretches if stretch.end > stretch.start),
            )
            start += count

    def _select_decode(
        self,
        queries: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        metadata: LatentMetadata,
        selected: torch.Tensor,
    ) -> None:
        index, bound = self.spec.index, metadata.decode_bound
        assert index is not None
        room = _room(len(metadata.decode_lens), bound, queries.device)
        for rows in _passes(len(metadata.decode_lens), room):
            scores = room[: rows.stop - rows.start]
            lens = metadata.decode_lens[rows]
            index_scores_decode(
                queries[rows], weights[rows], keys, metadata.decode_tables[rows], lens, bound, scores,
                skip_below=index.topk,
            )  # fmt: skip
            topk_select(scores, lens, index.topk, selected[rows])

    def _select_stretch(
        self,
        queries: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        pages: torch.Tensor,
        stretch: _Stretch,
        lens: torch.Tensor,
        selected: torch.Tensor,
    ) -> None:
        index = self.spec.index
        assert index is not None
        room = _room(stretch.end - stretch.start, stretch.num_keys, queries.device)
        for part in _passes(stretch.end - stretch.start, room):
            rows = slice(stretch.start + part.start, stretch.start + part.stop)
            scores = room[: part.stop - part.start]
            first = stretch.first_position + part.start
            num_keys = stretch.first_position + part.stop  # what the last query of the pass sees
            index_scores_prefill(queries[rows], weights[rows], keys, pages, first, num_keys, scores)
            topk_select(scores, lens[rows], index.topk, selected[rows])


def _room(num_rows: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Where a pass's scores lie: float32 [rows, at least num_keys] of at most SCORE_BYTES, one row at least."""
    width = ceil_div(num_keys, _WIDTH) * _WIDTH
    rows = min(num_rows, queries_per_pass(width, SCORE_BYTES))
    return torch.empty((rows, width), dtype=torch.float32, device=device)


def _passes(num_rows: int, room: torch.Tensor) -> Iterator[slice]:
    """Slices of at most as many rows as there is room for."""
    for start in range(0, num_rows, len(room)):
        yield slice(start, min(start + len(room), num_rows))


__all__ = ["SCORE_BYTES", "LatentMetadata", "TritonLatentBackend"]
