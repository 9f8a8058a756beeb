"""The same rows once in one pool and once dealt out over ranks' pools: single-rank backends judge sharded ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.common.layout import ceil_div, owner_of
from benthic.forward import ForwardBatch, StepInput
from benthic.parallel.collectives import Collectives
from benthic.parallel.cp_split import RankStep
from benthic.runner.rank_rows import rank_arrays, rank_batch, split
from tests.support.sampling_cases import sampling_input

# decode rows, contexts with the step's tokens, new tokens; for pages of 4
MIXTURES = [
    (0, [1], [1]),
    (0, [3], [3]),
    (0, [9], [9]),  # fewer pages than segments
    (0, [64], [64]),
    (0, [37], [37]),
    (0, [50], [13]),  # the context ends within a page
    (0, [50], [1]),
    (0, [9, 30, 1, 44], [9, 7, 1, 20]),
    (1, [1], [1]),
    (3, [1, 17, 40], [1, 1, 1]),  # rows of one page are on one rank alone
    (1, [5, 6], [1, 1]),
    (4, [2, 33, 8, 64, 21, 5, 40], [1, 1, 1, 1, 21, 2, 9]),
    (2, [90, 3, 70], [1, 1, 70]),
]


@dataclass(frozen=True)
class Lanes:
    """Where each page of the rows lies in one pool and in the pool of its owner."""

    size: int
    page_size: int
    num_pages: int  # of each rank's pool, without scratch
    table: NDArray[np.int32]  # [R, M] page of the owner's pool
    pairs: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]  # by rank: pages of its pool, of the one pool

    def pool(self, rank: int, single: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        """The rank's pool: the single one's slices [L, …] where it has them, the fill's [L, …] elsewhere."""
        pool = fill.unsqueeze(1).repeat(1, self.num_pages + 1, *[1] * (fill.dim() - 1))
        own, one = self.pairs[rank]
        pool[:, torch.from_numpy(own)] = single[:, torch.from_numpy(one)]
        return pool


def deal(table: torch.Tensor, num_pages: Sequence[int], page_size: int, size: int, seed: int = 0) -> Lanes:
    """Shuffled pages for rows whose first `num_pages` pages stand in `table`."""
    rng = np.random.default_rng(seed)
    local = np.zeros(table.shape, np.int32)
    places = [[(row, i) for row, n in enumerate(num_pages) for i in range(n) if owner_of(i, size) == rank]
              for rank in range(size)]  # fmt: skip
    room = max(len(own) for own in places) + 2
    pairs = []
    for own in places:
        pages = rng.permutation(room)[: len(own)]
        for (row, i), page in zip(own, pages, strict=True):
            local[row, i] = page
        pairs.append((pages.astype(np.int64), np.array([int(table[row, i]) for row, i in own], np.int64)))
    return Lanes(size, page_size, room, local, tuple(pairs))


def make_batch(
    table: torch.Tensor, firsts: Sequence[int], ends: Sequence[int], num_decode: int, page_size: int
) -> ForwardBatch:
    """Tokens firsts[r] … ends[r] - 1 of each row, for one rank alone."""
    positions = [torch.arange(first, end) for first, end in zip(firsts, ends, strict=True)]
    slots = [table[row, p // page_size].long() * page_size + p % page_size for row, p in enumerate(positions)]
    query_lens = [len(p) for p in positions[num_decode:]]
    tokens = sum(map(len, positions))
    return ForwardBatch(
        num_tokens=tokens,
        num_decode=num_decode,
        max_seq_len=max(ends),
        max_query_len=max(query_lens, default=0),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.cat(positions),
        kv_slots=torch.cat(slots),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        page_table=table,
        cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(ends),
    )


def rank_forward(
    batch: ForwardBatch, lanes: Lanes, group: Collectives, padding: int = 0
) -> tuple[RankStep, ForwardBatch]:
    """The part of one rank in a single rank's batch, with rows of padding behind; an empty part gets one at least."""
    device = batch.positions.device
    step = StepInput(
        tick=0,
        num_decode=batch.num_decode,
        query_lens=np.array(batch.query_lens_host, np.int32),
        token_ids=np.zeros(batch.num_tokens, np.int32),
        positions=batch.positions.cpu().numpy(),
        kv_slots=np.zeros(batch.num_tokens, np.int64),
        seq_lens=np.array(batch.seq_lens_host, np.int32),
        page_table=lanes.table[: len(batch.seq_lens_host)],
        state_slots=np.zeros(len(batch.seq_lens_host), np.int64),
        sample_rows=np.zeros(0, np.int64),
        sample_slots=np.zeros(0, np.int64),
        sampling=sampling_input(0),
    )
    part = split(step, lanes.page_size, group)
    rows = max(1, len(part.own_rows) + padding)
    arrays = rank_arrays(step, part, rows, lanes.page_size)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
    return part, rank_batch(step, part, tensors, tensors["token_ids"].long(), None)


def own_part(x: torch.Tensor, part: RankStep, rows: int) -> torch.Tensor:
    """Of x [T, …] the rank's rows, with zeros up to `rows`."""
    out = x.new_zeros((rows, *x.shape[1:]))
    out[: len(part.own_rows)] = x[torch.from_numpy(part.own_rows).to(x.device)]
    return out


def num_pages(lens: Sequence[int], page_size: int) -> list[int]:
    """Of each row."""
    return [ceil_div(n, page_size) for n in lens]
