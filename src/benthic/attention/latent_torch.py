"""Latent attention with torch's own kernels: the CPU's backend, and the reference for the others on any device.

Letters beside those of `latent.py`: n queries of a block, S keys, W = R + P. Attention is computed in float32, scores
in float64 and rounded once: how a library orders sums depends on the shapes, and must not show in what a token selects
in one chunk or batch or another. Blocks of queries keep what exists at once within constants, so memory never grows
with queries times context; they are small enough for a core's cache, where gathering is several times as fast.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from benthic.attention.latent import LatentBackend, LatentSpec
from benthic.attention.latent_reading import all_positions, entry_floats, key_scores, read_keys, read_latents
from benthic.attention.torch_backend import group_by_length
from benthic.common.layout import ceil_div
from benthic.forward import ForwardBatch
from benthic.kernels.topk_select import topk_select

BLOCK_BYTES = 4 << 20  # that a block gathers or computes


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of similar length, which can share one rectangle of keys."""

    rows: torch.Tensor  # int64 [rows]
    pages: torch.Tensor  # int64 [rows, pages of the longest]
    lens: torch.Tensor  # int32 [rows]
    longest: int


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One prefill row: tokens start … end - 1 of the batch, the last of `num_keys` tokens."""

    start: int
    end: int
    num_keys: int
    pages: torch.Tensor  # int64 [pages]

    def blocks(self, key_bytes: int) -> Iterator[tuple[slice, int]]:
        """(tokens of the batch, keys that the last of them sees); a query needs `key_bytes` for each key."""
        size = max(1, BLOCK_BYTES // (key_bytes * self.num_keys))
        for first in range(self.start, self.end, size):
            last = min(first + size, self.end)
            yield slice(first, last), self.num_keys - (self.end - last)


@dataclass(frozen=True, slots=True)
class LatentTorchMetadata:
    """What all layers of one forward pass share."""

    decode: tuple[_DecodeGroup, ...]
    decode_table: torch.Tensor  # int64 [D, M]
    prefills: tuple[_Prefill, ...]
    selects: bool


class TorchLatentBackend(LatentBackend):
    """Gathers latents, all or the selected ones, and multiplies."""

    name: ClassVar[str] = "torch"

    @classmethod
    def unsupported(cls, spec: LatentSpec) -> str | None:
        """Why this backend can't run that, in words, or None: it runs on every device."""
        if spec.fp8 and spec.rank % 4:
            return f"latents of {spec.rank} numbers can't be fp8: the scales behind them would not be aligned"
        return None

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch) -> LatentTorchMetadata:
        """Metadata for one forward pass. On a CPU it reads the batch's tensors: run it again when they change."""
        lens = self._row_lens(batch)
        table = batch.page_table.long()
        decode = group_by_length(lens[: batch.num_decode], self.spec.page_size) if batch.num_decode else []
        index = self.spec.index
        return LatentTorchMetadata(
            decode=tuple(self._group(rows, lens, table, batch) for rows in decode),
            decode_table=table[: batch.num_decode],
            prefills=tuple(self._prefills(batch, table)),
            selects=index is not None and max(lens, default=0) > index.topk,
        )

    def needs_selection(self, metadata: LatentTorchMetadata) -> bool:
        """See LatentBackend.needs_selection."""
        return metadata.selects

    @torch.inference_mode()
    def select(
        self,
        ordinal: int,
        queries: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
        metadata: LatentTorchMetadata,
    ) -> torch.Tensor:
        """See LatentBackend.select."""
        index = self.spec.index
        assert index is not None
        queries, weights = queries.to(torch.float64), weights.to(torch.float64)
        selected = torch.full((len(queries), index.topk), -1, dtype=torch.int32, device=queries.device)
        for group in metadata.decode:
            self._select_decode(ordinal, queries, weights, group, selected)
        for row in metadata.prefills:
            self._select_prefill(ordinal, queries, weights, batch.positions, row, selected)
        return selected

    @torch.inference_mode()
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        selected: torch.Tensor | None,
        batch: ForwardBatch,
        metadata: LatentTorchMetadata,
    ) -> torch.Tensor:
        """See LatentBackend.attend."""
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        out[batch.num_tokens :] = 0  # rows of padding
        q = torch.cat((q_latent, q_rope), -1).float().mul_(self.spec.scale)
        if selected is None:
            for group in metadata.decode:
                self._dense_decode(layer, q, group, out)
        elif batch.num_decode:
            self._sparse_decode(layer, q, selected, metadata.decode_table, out)
        for row in metadata.prefills:
            if selected is None:
                self._dense_prefill(layer, q, row, out)
            else:
                self._sparse_prefill(layer, q, selected, row, out)
        return out

    # --- metadata -----------------------------------------------------------------------------------------------------

    def _row_lens(self, batch: ForwardBatch) -> list[int]:
        """Of each row; in a graph on a device, where they can't be known, their bound."""
        if not batch.in_graph:
            return list(batch.seq_lens_host)
        if batch.seq_lens.device.type == "cpu":  # a replay runs this again
            return [int(length) for length in batch.seq_lens.tolist()]
        return [batch.max_seq_len] * len(batch.seq_lens)

    def _group(self, rows: list[int], lens: list[int], table: torch.Tensor, batch: ForwardBatch) -> _DecodeGroup:
        longest = max(lens[row] for row in rows)
        every = len(rows) == batch.num_decode  # then in order; a graph can't hold a copy from the host
        index = torch.arange(len(rows), device=table.device) if every else torch.tensor(rows, device=table.device)
        pages = table[index, : ceil_div(longest, self.spec.page_size)]
        return _DecodeGroup(index, pages, batch.seq_lens[index], longest)

    def _prefills(self, batch: ForwardBatch, table: torch.Tensor) -> Iterator[_Prefill]:
        start = batch.num_decode
        lens = batch.seq_lens_host[batch.num_decode :]
        for row, (count, length) in enumerate(zip(batch.query_lens_host, lens, strict=True), batch.num_decode):
            yield _Prefill(start, start + count, length, table[row, : ceil_div(length, self.spec.page_size)])
            start += count

    # --- selection ----------------------------------------------------------------------------------------------------

    def _select_decode(
        self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, group: _DecodeGroup, selected: torch.Tensor
    ) -> None:
        index = self.spec.index
        assert index is not None
        if group.longest <= index.topk:
            selected[group.rows] = all_positions(group.lens, index.topk)
            return
        for rows in _slices(len(group.rows), group.longest * (index.head_dim + index.num_heads) * 8):
            where = group.rows[rows]
            keys = self._keys(ordinal, group.pages[rows], group.longest)
            scores = key_scores(queries[where], weights[where], keys)
            selected[where] = topk_select(scores, group.lens[rows], index.topk)

    def _select_prefill(
        self,
        ordinal: int,
        queries: torch.Tensor,
        weights: torch.Tensor,
        positions: torch.Tensor,
        row: _Prefill,
        selected: torch.Tensor,
    ) -> None:
        index = self.spec.index
        assert index is not None
        keys = self._keys(ordinal, row.pages.unsqueeze(0), row.num_keys)[0] if row.num_keys > index.topk else None
        for block, seen in row.blocks((index.num_heads + 1) * 8):
            lens = (positions[block] + 1).to(torch.int32)
            if keys is None or seen <= index.topk:
                selected[block] = all_positions(lens, index.topk)
                continue
            products = queries[block].reshape(-1, index.head_dim) @ keys[:seen].T
            products = products.relu_().view(len(lens), index.num_heads, seen)
            scores = torch.bmm(weights[block].unsqueeze(1), products).squeeze(1).float()
            topk_select(scores, lens, index.topk, selected[block])

    # --- attention ----------------------------------------------------------------------------------------------------

    def _dense_decode(self, layer: int, q: torch.Tensor, group: _DecodeGroup, out: torch.Tensor) -> None:
        for rows in _slices(len(group.rows), group.longest * q.shape[2] * 4):
            where = group.rows[rows]
            keys = torch.arange(group.longest, device=q.device)
            hidden = keys >= group.lens[rows].unsqueeze(1)
            entries = self._context(layer, group.pages[rows], group.longest)
            out[where] = self._attended(q[where], entries, hidden).to(out.dtype)

    def _sparse_decode(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, table: torch.Tensor, out: torch.Tensor
    ) -> None:
        size, pool = self.spec.page_size, self.latents[layer]
        pool = pool.view(-1, pool.shape[-1])
        for rows in _slices(len(table), selected.shape[1] * q.shape[2] * 4):
            chosen = selected[rows].long()
            hidden = chosen < 0
            chosen.clamp_(min=0)
            pages = table[rows].gather(1, torch.div(chosen, size, rounding_mode="floor"))
            slots = pages.mul_(size).add_(chosen.remainder_(size))
            entries = entry_floats(pool.index_select(0, slots.flatten()), self.spec.rank).view(*slots.shape, -1)
            out[rows] = self._attended(q[rows], entries, hidden).to(out.dtype)

    def _dense_prefill(self, layer: int, q: torch.Tensor, row: _Prefill, out: torch.Tensor) -> None:
        heads, rank = self.spec.num_heads, self.spec.rank
        context = self._context(layer, row.pages.unsqueeze(0), row.num_keys)[0]
        for block, seen in row.blocks(heads * 4):
            count = block.stop - block.start
            entries = context[:seen]
            scores = (q[block].view(count * heads, -1) @ entries.T).view(count, heads, seen)
            future = torch.ones((count, count), dtype=torch.bool, device=q.device).triu_(1)
            scores[:, :, seen - count :].masked_fill_(future.unsqueeze(1), float("-inf"))
            probs = torch.softmax(scores, -1).view(count * heads, seen)
            out[block] = (probs @ entries[:, :rank]).view(count, heads, rank).to(out.dtype)

    def _sparse_prefill(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, row: _Prefill, out: torch.Tensor
    ) -> None:
        width = q.shape[2]
        context = self._context(layer, row.pages.unsqueeze(0), row.num_keys)[0]
        chosen = selected[row.start : row.end, : row.num_keys]  # no more than there are, with K of them
        hidden = chosen < 0
        chosen = chosen.clamp(min=0)
        size = max(1, BLOCK_BYTES // (chosen.shape[1] * width * 4))
        entries = torch.empty((min(size, len(chosen)) * chosen.shape[1], width), device=q.device)
        masked = bool(hidden.any())
        for first in range(0, len(chosen), size):
            part = slice(first, min(first + size, len(chosen)))
            block = slice(row.start + part.start, row.start + part.stop)
            count = part.stop - part.start
            gathered = entries[: count * chosen.shape[1]]
            torch.index_select(context, 0, chosen[part].reshape(-1), out=gathered)
            attended = self._attended(q[block], gathered.view(count, -1, width), hidden[part] if masked else None)
            out[block] = attended.to(out.dtype)

    def _attended(self, q: torch.Tensor, entries: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """q [n, H, W], scaled, over entries [n, S, W], but for those `hidden` [n, S] -> float32 [n, H, R]."""
        scores = torch.bmm(q, entries.transpose(1, 2))
        if hidden is not None:
            scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
        return torch.bmm(torch.softmax(scores, -1), entries[..., : self.spec.rank])

    # --- the pools ----------------------------------------------------------------------------------------------------

    def _context(self, layer: int, pages: torch.Tensor, num_keys: int) -> torch.Tensor:
        return read_latents(self.latents[layer], pages, num_keys, self.spec.rank)

    def _keys(self, ordinal: int, pages: torch.Tensor, num_keys: int) -> torch.Tensor:
        assert self.index_keys is not None
        return read_keys(self.index_keys[ordinal], pages, num_keys, self.spec)


def _slices(count: int, item_bytes: int) -> Iterator[slice]:
    """0 … count - 1 in slices of at most BLOCK_BYTES, or of one item."""
    size = max(1, BLOCK_BYTES // item_bytes)
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))
