"""Attention with torch's own kernels: the CPU's backend, and the reference for the others on any device.

Letters: R decode rows of one group, G key/value heads, Q = H / G query heads that share one, S keys, d head_dim. A
layer of the pool is seen as page halves [(pages + 1) * 2, page_size * G * d]: page p's keys are half 2p, its values
half 2p + 1. Masked keys must be finite: the pool starts zeroed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benthic.attention.interface import AttentionBackend, AttentionSpec
from benthic.common.layout import ceil_div
from benthic.forward import ForwardBatch

_QUERY_BLOCK = 256  # queries attended at once over cached context: the mask stays small, the future is skipped
_MAX_PADDING = 1.25  # keys of a decode group at most, against those that its rows really have


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of similar length, attended in one call."""

    rows: torch.Tensor | None  # int64 [R]; None: all decode rows
    num_rows: int
    halves: torch.Tensor  # int64 [2 * R * pages]: the halves of all keys, then of all values
    num_keys: int  # S
    mask: torch.Tensor | None  # [R, 1, 1, S], 0 or -inf; None: every key counts


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One prefill row: tokens start … end - 1 of the batch, the last of `num_keys` tokens."""

    start: int
    end: int
    num_keys: int
    halves: torch.Tensor | None  # int64 [2 * pages]; None: no context, the new keys are all there are


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    """What all layers of one forward pass share."""

    key_slots: torch.Tensor  # int64 [T] token places in the pool of a layer, seen as [(pages + 1) * 2 * page_size]
    value_slots: torch.Tensor
    decode: tuple[_DecodeGroup, ...]
    prefills: tuple[_Prefill, ...]
    masks: dict[tuple[int, int], torch.Tensor]  # causal, by (queries, keys)


class TorchBackend(AttentionBackend):
    """Gathers the pages of a row and calls scaled_dot_product_attention."""

    name = "torch"

    def __init__(self, spec: AttentionSpec, kv: torch.Tensor) -> None:
        super().__init__(spec, kv)
        half = spec.page_size * spec.num_kv_heads * spec.head_dim
        self._halves = [layer.view(-1, half) for layer in kv]
        self._tokens = [layer.view(-1, spec.num_kv_heads, spec.head_dim) for layer in kv]

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None: it runs everywhere."""
        return None

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch) -> TorchMetadata:
        """Metadata for one forward pass. On a CPU it reads the batch's tensors: run it again when they change."""
        size = self.spec.page_size
        key_slots = batch.kv_slots + torch.div(batch.kv_slots, size, rounding_mode="floor") * size
        prefills, masks = self._begin_prefills(batch)
        return TorchMetadata(
            key_slots=key_slots,
            value_slots=key_slots + size,
            decode=self._begin_decode(batch) if batch.num_decode else (),
            prefills=prefills,
            masks=masks,
        )

    @torch.inference_mode()
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        metadata: TorchMetadata,
    ) -> torch.Tensor:
        """Write k, v [T, G, d], then attend q [T, H, d] -> [T, H, d]."""
        tokens = self._tokens[layer]
        tokens.index_copy_(0, metadata.key_slots, k)
        tokens.index_copy_(0, metadata.value_slots, v)
        num_decode = batch.num_decode
        if num_decode == len(q) and len(metadata.decode) == 1:
            return self._decode(layer, q, metadata.decode[0])
        out = torch.empty_like(q)
        out[batch.num_tokens :] = 0  # rows of padding
        for group in metadata.decode:
            if group.rows is None:
                out[:num_decode] = self._decode(layer, q[:num_decode], group)
            else:
                out[group.rows] = self._decode(layer, q[group.rows], group)
        for prefill in metadata.prefills:
            self._prefill(layer, q, k, v, prefill, metadata, out)
        return out

    # --- metadata -----------------------------------------------------------------------------------------------------

    def _begin_decode(self, batch: ForwardBatch) -> tuple[_DecodeGroup, ...]:
        num_decode, size = batch.num_decode, self.spec.page_size
        seq_lens = batch.seq_lens[:num_decode]
        table = batch.page_table[:num_decode].long()
        if self.spec.device.type != "cpu":  # the lengths stay on the device: one padded group, which graphs can capture
            num_pages = min(table.shape[1], ceil_div(batch.max_seq_len, size))
            return (self._group(None, table[:, :num_pages], seq_lens, num_pages * size),)
        lens = seq_lens.tolist()
        groups = group_by_length(lens, size)
        return tuple(
            self._cpu_group(rows if len(groups) > 1 else None, [lens[r] for r in rows], table, seq_lens)
            for rows in groups
        )

    def _cpu_group(
        self, rows: Sequence[int] | None, lens: list[int], table: torch.Tensor, seq_lens: torch.Tensor
    ) -> _DecodeGroup:
        longest = max(lens)
        num_pages = ceil_div(longest, self.spec.page_size)
        index = None if rows is None else torch.tensor(rows)
        if index is not None:
            table, seq_lens = table[index], seq_lens[index]
        # keys past the longest row are cut off; with rows of one length no mask is left
        return self._group(index, table[:, :num_pages], seq_lens if min(lens) < longest else None, longest)

    def _group(
        self, rows: torch.Tensor | None, table: torch.Tensor, seq_lens: torch.Tensor | None, num_keys: int
    ) -> _DecodeGroup:
        mask = None
        if seq_lens is not None:
            keys = torch.arange(num_keys, device=table.device)
            hidden = keys >= seq_lens.unsqueeze(1)
            zeros = torch.zeros(hidden.shape, dtype=self.spec.dtype, device=table.device)
            mask = zeros.masked_fill_(hidden, float("-inf")).view(len(table), 1, 1, num_keys)
        halves = table.reshape(-1) * 2
        return _DecodeGroup(rows, len(table), torch.cat((halves, halves + 1)), num_keys, mask)

    def _begin_prefills(self, batch: ForwardBatch) -> tuple[tuple[_Prefill, ...], dict[tuple[int, int], torch.Tensor]]:
        prefills: list[_Prefill] = []
        masks: dict[tuple[int, int], torch.Tensor] = {}
        start = batch.num_decode
        lens = batch.seq_lens_host[batch.num_decode :]
        for row, (num_queries, num_keys) in enumerate(zip(batch.query_lens_host, lens, strict=True), batch.num_decode):
            halves = None
            if num_keys > num_queries:
                pages = batch.page_table[row, : ceil_div(num_keys, self.spec.page_size)].long() * 2
                halves = torch.cat((pages, pages + 1))
            if halves is not None:
                for _, count, seen in _query_blocks(num_queries, num_keys):
                    if count > 1 and (count, seen) not in masks:
                        masks[count, seen] = self._causal_mask(count, seen)
            prefills.append(_Prefill(start, start + num_queries, num_keys, halves))
            start += num_queries
        return tuple(prefills), masks

    def _causal_mask(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """[num_queries, num_keys]; the last query sees the last key."""
        mask = torch.full((num_queries, num_keys), float("-inf"), dtype=self.spec.dtype, device=self.spec.device)
        return mask.triu_(num_keys - num_queries + 1)

    # --- attention ----------------------------------------------------------------------------------------------------

    def _gather(
        self, layer: int, halves: torch.Tensor, num_rows: int, num_keys: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, G, S, d] of whole pages, cut to S."""
        spec = self.spec
        both = self._halves[layer].index_select(0, halves)
        both = both.view(2, num_rows, -1, spec.num_kv_heads, spec.head_dim)[:, :, :num_keys].transpose(2, 3)
        return both[0], both[1]

    def _decode(self, layer: int, q: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        """q [R, H, d]: the heads that share a key/value head stand in for queries, so its keys are read once."""
        spec = self.spec
        k, v = self._gather(layer, group.halves, group.num_rows, group.num_keys)
        grouped = q.reshape(group.num_rows, spec.num_kv_heads, -1, spec.head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=spec.scale)
        return out.reshape(q.shape)

    def _prefill(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        row: _Prefill,
        metadata: TorchMetadata,
        out: torch.Tensor,
    ) -> None:
        queries, result = q[row.start : row.end], out[row.start : row.end]
        if row.halves is None:
            keys = k[row.start : row.end].transpose(0, 1).unsqueeze(0)
            values = v[row.start : row.end].transpose(0, 1).unsqueeze(0)
            self._attend_rows(queries, keys, values, None, len(queries) > 1, result)
            return
        keys, values = self._gather(layer, row.halves, 1, row.num_keys)
        for first, count, seen in _query_blocks(row.end - row.start, row.num_keys):
            block = slice(first, first + count)
            mask = metadata.masks.get((count, seen))  # a single query sees every key
            block_keys, block_values = keys[:, :, :seen], values[:, :, :seen]
            self._attend_rows(queries[block], block_keys, block_values, mask, False, result[block])

    def _attend_rows(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        out: torch.Tensor,
    ) -> None:
        """q [T, H, d] over keys and values [1, G, S, d] into out [T, H, d]."""
        spec = self.spec
        shared = spec.num_heads // spec.num_kv_heads
        # heads as [Q, G]: keys repeat along the batch with stride 0 instead of being copied for each query head
        folded = q.reshape(len(q), spec.num_kv_heads, shared, spec.head_dim).permute(2, 1, 0, 3)
        attended = F.scaled_dot_product_attention(
            folded,
            keys.expand(shared, -1, -1, -1),
            values.expand(shared, -1, -1, -1),
            attn_mask=mask,
            is_causal=causal,
            scale=spec.scale,
        )
        out.view(len(q), spec.num_kv_heads, shared, spec.head_dim).copy_(attended.permute(2, 1, 0, 3))


def _query_blocks(num_queries: int, num_keys: int) -> list[tuple[int, int, int]]:
    """(first query, queries, keys that the last of them sees) of each block of a prefill row with context."""
    context = num_keys - num_queries
    return [
        (first, min(_QUERY_BLOCK, num_queries - first), context + min(first + _QUERY_BLOCK, num_queries))
        for first in range(0, num_queries, _QUERY_BLOCK)
    ]


def group_by_length(lens: Sequence[int], page_size: int) -> list[list[int]]:
    """Rows in groups whose padded keys are at most a quarter more than their real ones, or a page a row more."""
    order = sorted(range(len(lens)), key=lambda r: -lens[r])
    groups: list[list[int]] = []
    real = 0
    for row in order:
        size = len(groups[-1]) + 1 if groups else 0
        if groups and size * lens[groups[-1][0]] <= _MAX_PADDING * (real + lens[row]) + size * page_size:
            groups[-1].append(row)
            real += lens[row]
        else:
            groups.append([row])
            real = lens[row]
    return groups if len(groups) > 1 else [sorted(order)]
