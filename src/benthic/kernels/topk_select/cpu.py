"""`topk_select` for a CPU: a quickselect of the k-th score and comparisons, a fifth of the reference's sort.

A row's positions come in rising order, which also keeps together what is gathered by them.
"""

import torch

_ROWS = 64  # at once: the scratch of a few thousand positions stays in a core's cache


def topk_select_cpu(scores: torch.Tensor, lens: torch.Tensor, k: int, out: torch.Tensor) -> torch.Tensor:
    """See `benthic.kernels.topk_select.topk_select`."""
    places = torch.arange(k, dtype=torch.int32)
    for first in range(0, len(scores), _ROWS):
        part = slice(first, first + _ROWS)
        part_lens, part_out = lens[part], out[part]
        longer = part_lens > k
        if bool(longer.all()):
            part_out.copy_(_select(scores[part], part_lens, k))
            continue
        part_out.copy_(torch.where(places < part_lens.unsqueeze(1), places, -1))
        if bool(longer.any()):
            part_out[longer] = _select(scores[part][longer], part_lens[longer], k)
    return out


def _select(scores: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [n, k], of rows that are all longer than k."""
    num_rows, width = scores.shape
    outside = torch.arange(width, dtype=torch.int32) >= lens.unsqueeze(1)
    scores = scores.masked_fill(outside, float("-inf"))  # below the scores of its row, or equal to some and behind
    last = scores.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = scores >= last
    if int(chosen.count_nonzero()) > num_rows * k:  # more scores equal to the k-th than there are places left
        above = scores > last
        equal = chosen & ~above
        chosen = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return chosen.nonzero()[:, 1].view(num_rows, k).to(torch.int32)
