"""One layer's pages and new tokens on their way between context-parallel ranks.

Whether a rank enters an exchange follows from the step's sizes alone (`max_context`, `max_rank_len`), which all ranks
know alike; all payloads of a layer travel together, as bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from benthic.attention.page_records import PageRecords, Places
from benthic.forward import ForwardBatch, RankBatch
from benthic.parallel.collectives import Collectives, padded_gather

Inner = TypeVar("Inner")


@dataclass(frozen=True, slots=True)
class LayerPayload:
    """One payload in one layer."""

    records: PageRecords
    own: torch.Tensor  # [pages + 1, *slice] of this rank's L1 pool
    work: torch.Tensor  # [pages + 1, *slice] of the work pool


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """Where the tokens of one step lie; the same in every layer."""

    own_work: Places  # in the work pool, the rows that this rank computes: decode rows, then its segments' [N]
    prefill_work: Places  # in the work pool, all ranks' prefill rows in the step's order [T - D]
    writes: Places  # in L1, the rows that this rank keeps

    @classmethod
    def of(cls, batch: ForwardBatch, ranks: RankBatch, page_size: int) -> "StepPlaces":
        """Those of the batch."""
        return cls(
            Places.of(batch.kv_slots[: batch.num_tokens], page_size),
            Places.of(ranks.work_slots[batch.num_decode :], page_size),
            Places.of(ranks.write_slots, page_size),
        )


def bring_context(group: Collectives, payloads: Sequence[LayerPayload], ranks: RankBatch) -> None:
    """Bring the pages before the prefill rows' new tokens from their owners into the work pool. One all-gather or none.

    To be called before new tokens are put there: the last of these pages may be the first of theirs.
    """
    if not ranks.step.max_context:  # replicated: of the rank that gives most
        return
    given = [payload.records.read_pages(payload.own, ranks.context_pages) for payload in payloads]
    gathered = padded_gather(group, _joined(given), ranks.step.max_context).index_select(0, ranks.context_from)
    widths = [payload.records.slice_bytes for payload in payloads]
    for payload, slices in zip(payloads, gathered.split_with_sizes(widths, 1), strict=True):
        payload.records.write_pages(payload.work, ranks.context_to, slices)


def share_records(
    group: Collectives,
    payloads: Sequence[LayerPayload],
    own: Sequence[torch.Tensor],
    ranks: RankBatch,
    places: StepPlaces,
) -> None:
    """Put all ranks' new tokens into the work pool, and those whose pages this rank keeps into L1.

    `own` holds for each payload the records of this rank's rows: uint8 [N, record_bytes]. One all-gather or none.
    """
    step = ranks.step
    records = _joined(own)
    widths = [payload.records.record_bytes for payload in payloads]
    if step.max_rank_len:  # replicated: of the rank that computes most prefill rows
        decode, prefill = records[: step.num_decode], records[step.num_decode :]
        prefill = padded_gather(group, prefill, step.max_rank_len).index_select(0, ranks.gather_rows)
        for payload, part in zip(payloads, prefill.split_with_sizes(widths, 1), strict=True):
            payload.records.write(payload.work, places.prefill_work, part)
        records = torch.cat((decode, prefill))
    records = records.index_select(0, ranks.write_rows)
    for payload, part in zip(payloads, records.split_with_sizes(widths, 1), strict=True):
        payload.records.write(payload.own, places.writes, part)


@dataclass(frozen=True, slots=True)
class Room(Generic[Inner]):
    """One-layer pools like L1's, [pages, *slice] each, and a backend over them, whose only layer is 0."""

    inner: Inner
    pools: list[torch.Tensor]


class WorkPool(Generic[Inner]):
    """Where a backend finds all ranks' pages of one layer; grows and never shrinks."""

    def __init__(self, pools: Sequence[torch.Tensor], make_inner: Callable[[list[torch.Tensor]], Inner]) -> None:
        """`pools`: L1's [layers, pages + 1, *slice], for the slices' shapes; `make_inner`: the backend over others."""
        self._like = pools
        self._make_inner = make_inner
        self._num_pages = 0  # with the scratch page
        self._room: Room[Inner] | None = None

    def room(self, num_pages: int) -> Room[Inner]:
        """Room for these pages and one of scratch behind them; what is in it stays from the step before."""
        if self._room is None or self._num_pages < num_pages + 1:
            self._num_pages = max(num_pages + 1, self._num_pages + self._num_pages // 4)
            self._room = None  # the old one goes first
            # zeroed: what no token has filled is multiplied by zero, and must not be NaN
            pools = [pool.new_zeros((1, self._num_pages, *pool.shape[2:])) for pool in self._like]
            self._room = Room(self._make_inner(pools), [pool[0] for pool in pools])
        return self._room


def segments_batch(batch: ForwardBatch) -> ForwardBatch:
    """This rank's segments as the prefill rows of a batch of their own, padding rows included."""
    decode = batch.num_decode
    return ForwardBatch(
        num_tokens=batch.num_tokens - decode,
        num_decode=0,
        max_seq_len=max(batch.seq_lens_host[decode:], default=0),
        max_query_len=batch.max_query_len,
        input_ids=batch.input_ids[decode:],
        positions=batch.positions[decode:],
        kv_slots=batch.kv_slots[decode:],
        seq_lens=batch.seq_lens[decode:],
        page_table=batch.page_table[decode:],
        cu_query_lens=batch.cu_query_lens,
        query_lens_host=batch.query_lens_host,
        seq_lens_host=batch.seq_lens_host[decode:],
    )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
