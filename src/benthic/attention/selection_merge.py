"""The exact best K positions of decode rows whose pages lie on several ranks.

Each rank's best K of its own pages hold all that can be among the best K of all. Letters: D decode rows, C candidates a
rank gives, at most K.
"""

import torch

from benthic.attention.partial import own_bound
from benthic.common.layout import owner_of
from benthic.parallel.collectives import Collectives

_NONE = torch.iinfo(torch.int32).max  # the position of a candidate that is none: behind all others


def num_candidates(max_decode_len: int, page_size: int, num_ranks: int, topk: int) -> int:
    """C: no rank has more positions of a row than this, or no more than K of them are wanted."""
    return min(topk, own_bound(max_decode_len, page_size, num_ranks))


def own_positions(selected: torch.Tensor, page_size: int, group: Collectives) -> torch.Tensor:
    """Of positions int32 [D, K], -1 for none, those on this rank's pages as places among its own tokens of the row.

    int32 [D, K], in the same order, -1 behind. On the device alone: nothing waits for it.
    """
    page = torch.div(selected, page_size, rounding_mode="floor")  # of the row; -1 for none
    own = (selected >= 0) & (owner_of(page, group.size) == group.rank)  # type: ignore[arg-type]  # arrays too
    page = torch.div(page, group.size, rounding_mode="floor")  # here
    places = page * page_size + selected % page_size
    topk = selected.shape[1]
    # each goes behind those before it, the others to a column that is cut off, with 15 more: rows keep their alignment
    columns = torch.where(own, own.cumsum(1) - 1, topk)
    compact = selected.new_full((len(selected), topk + 16), -1)
    return compact.scatter_(1, columns, places)[:, :topk]


class Candidates:
    """This rank's best positions of D decode rows, until they are merged with the others'."""

    def __init__(self, num_rows: int, width: int, page_size: int, group: Collectives, device: torch.device) -> None:
        """`width` is C, and replicated."""
        self._page_size = page_size
        self._group = group
        self._scores = torch.full((num_rows, width), float("-inf"), device=device)
        self._positions = torch.full((num_rows, width), _NONE, dtype=torch.int32, device=device)

    def put(self, rows: torch.Tensor | slice, scores: torch.Tensor, best: torch.Tensor) -> None:
        """Of n rows the scores [n, S] of this rank's tokens and which of them are best: int32 [n, C], -1 behind.

        A row that is not put has no tokens here. What the scores hold behind a row's tokens does not matter.
        """
        none = best < 0
        index = best.clamp(min=0)
        size, group = self._page_size, self._group
        page = torch.div(index, size, rounding_mode="floor")
        positions = (page * group.size + group.rank) * size + index % size  # page m here is page m * n + r of the row
        self._positions[rows] = positions.masked_fill_(none, _NONE)
        self._scores[rows] = scores.gather(1, index.long()).masked_fill_(none, float("-inf"))

    def merged(self, topk: int) -> torch.Tensor:
        """int32 [D, K], best first, of equal scores the lowest position; -1 behind. The same everywhere. One gather."""
        both = torch.stack((self._scores.view(torch.int32), self._positions))
        every = self._group.all_gather(both.unsqueeze(0)).permute(1, 2, 0, 3).flatten(2)  # [2, D, n * C]
        order = every[1].argsort(1)  # by position first: the sort by score is stable
        positions = every[1].gather(1, order)
        scores = every[0].contiguous().view(torch.float32).gather(1, order) + 0.0  # -0 and 0 are one score
        best = scores.argsort(stable=True, dim=1, descending=True)[:, :topk]
        found = positions.gather(1, best)
        found = found.masked_fill(found == _NONE, -1)
        return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)
