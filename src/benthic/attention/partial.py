"""Attention of decode rows over a part of their keys, on every rank its own, and the merge of the parts.

Softmax over a union of keys follows from each part's output and log-sum-exp (https://arxiv.org/abs/2112.05682). Kernels
give both for all rows at once; plain torch goes by groups of rows, in float32. Letters: D decode rows, H heads, R a
value's size, n ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benthic.attention.interface import AttentionBackend
from benthic.attention.latent import LatentBackend
from benthic.attention.torch_backend import group_by_length
from benthic.common.layout import ceil_div
from benthic.forward import RankBatch
from benthic.parallel.collectives import Collectives

_BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # that a block of rows gathers; a core's cache, or few launches


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Decode rows of similar length on this rank, all with a token here at least."""

    rows: torch.Tensor  # int64 [n]
    pages: torch.Tensor  # int64 [n, pages of the longest], in this rank's pool
    lens: torch.Tensor  # int32 [n]
    longest: int

    def blocks(self, key_bytes: int) -> Iterator["OwnRows"]:
        """These in pieces, where a key takes `key_bytes`."""
        for part in row_blocks(len(self.rows), self.longest * key_bytes, self.rows.device):
            yield OwnRows(self.rows[part], self.pages[part], self.lens[part], self.longest)

    def hidden(self) -> torch.Tensor:
        """bool [n, longest]: past the row's end."""
        return torch.arange(self.longest, device=self.lens.device) >= self.lens.unsqueeze(1)


def own_rows(ranks: RankBatch, page_size: int) -> tuple[OwnRows, ...]:
    """Groups of the decode rows that have tokens here."""
    table, lens = ranks.decode_table, ranks.decode_lens
    lens_host = ranks.step.decode_lens.tolist()
    present = [row for row, length in enumerate(lens_host) if length]
    if not present:
        return ()
    groups = group_by_length([lens_host[row] for row in present], page_size)
    return tuple(_group([present[i] for i in group], lens_host, table, lens, page_size) for group in groups)


def _group(
    rows: list[int], lens_host: Sequence[int], table: torch.Tensor, lens: torch.Tensor, page_size: int
) -> OwnRows:
    longest = max(lens_host[row] for row in rows)
    index = torch.tensor(rows, device=table.device)
    return OwnRows(index, table[index, : ceil_div(longest, page_size)].long(), lens[index], longest)


def row_blocks(count: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """0 … count - 1 in slices of a bounded size, or of one row."""
    size = max(1, _BLOCK_BYTES.get(device.type, 4 << 20) // row_bytes)
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def takes_kernels(decode: type[AttentionBackend] | type[LatentBackend]) -> bool:
    """Whether decode rows that steps of one rank give to `decode` are computed in parts by kernels."""
    return decode.name == "triton"


def own_bound(max_seq_len: int, page_size: int, num_ranks: int) -> int:
    """The most tokens of one sequence that a rank keeps."""
    return ceil_div(ceil_div(max_seq_len, page_size), num_ranks) * page_size


class Parts:
    """What this rank has of D decode rows, until it is merged with the others': without keys here, nothing."""

    def __init__(self, both: torch.Tensor) -> None:
        """float32 [D, H, R + 1]: output and log-sum-exp side by side, for one exchange."""
        self._both = both

    @classmethod
    def none(cls, num_rows: int, num_heads: int, value_dim: int, device: torch.device) -> "Parts":
        """Of rows without keys here, until some are `put`."""
        both = torch.zeros((num_rows, num_heads, value_dim + 1), device=device)
        both[..., -1] = float("-inf")
        return cls(both)

    @classmethod
    def of(cls, out: torch.Tensor, lse: torch.Tensor) -> "Parts":
        """Of all rows: out float32 [D, H, R], lse float32 [D, H], base e; 0 and -inf where a row has no key here."""
        return cls(torch.cat((out, lse.unsqueeze(-1)), -1))

    def put(
        self,
        rows: torch.Tensor | slice,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Attend for n of the rows: q [n, G, h, W], scaled, keys [n, G, S, W], values [n, G, S, R], but hidden [n, S].

        The heads are G * h. All finite, hidden ones too. A row that is hidden whole has nothing here.
        """
        count, groups, shared, width = q.shape
        flat_keys, flat_values = keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:])
        scores = torch.bmm(q.reshape(-1, shared, width), flat_keys.transpose(1, 2))
        scores = scores.view(count, groups, shared, -1).masked_fill_(hidden[:, None, None], float("-inf"))
        lse = torch.logsumexp(scores, -1, keepdim=True)
        probs = torch.softmax(scores, -1).masked_fill_(lse == float("-inf"), 0)
        out = torch.bmm(probs.view(-1, shared, probs.shape[-1]), flat_values)
        self._both[rows] = torch.cat((out.view(count, groups * shared, -1), lse.view(count, -1, 1)), -1)

    def merged(self, group: Collectives) -> torch.Tensor:
        """Attention over all ranks' keys, float32 [D, H, R], the same on each bit by bit. One all-gather."""
        every = group.all_gather(self._both.unsqueeze(0))
        weights = torch.softmax(every[..., -1:], 0)  # each row has a key on some rank
        return (weights * every[..., :-1]).sum(0)
