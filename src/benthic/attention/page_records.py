"""How tokens lie in a payload's page slices, so that single tokens' bytes can travel between ranks and be put in place.

A *record* is what one token holds of a slice: its runs of bytes, one after another. A slice is made of *fields*, each
[page_size, width] with a token's bytes as a row:

    grouped query        keys, values                       latents, model dtype or fp8    one
    index keys           one in model dtype                 index keys, fp8                codes, scales
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # what bytes are copied as


@dataclass(frozen=True, slots=True)
class Places:
    """Where n tokens lie in pools of any layer."""

    pages: torch.Tensor  # int64 [n]
    offsets: torch.Tensor  # int64 [n], within the page

    @classmethod
    def of(cls, slots: torch.Tensor, page_size: int) -> "Places":
        """Those of slots, int64 [n]."""
        return cls(torch.div(slots, page_size, rounding_mode="floor"), slots % page_size)


class PageRecords:
    """The fields of one payload's slice; copies go in the widest unit that they allow.

    A pool, here, is one layer of an L1 pool or a work pool: [pages, *slice], contiguous.
    """

    def __init__(self, page_size: int, widths: Sequence[int]) -> None:
        """`widths`: bytes of a token in each field, in the slice's order."""
        unit = next(size for size in _UNITS if gcd(*widths) % size == 0)
        self.record_bytes = sum(widths)
        self.slice_bytes = page_size * self.record_bytes
        self._page_size = page_size
        self._unit = _UNITS[unit]
        self._widths = [width // unit for width in widths]

    def read(self, pool: torch.Tensor, at: Places) -> torch.Tensor:
        """The records at n places: uint8 [n, record_bytes]."""
        return torch.cat([field[at.pages, at.offsets] for field in self._fields(pool)], 1).view(torch.uint8)

    def write(self, pool: torch.Tensor, at: Places, records: torch.Tensor) -> None:
        """Put records, uint8 [n, record_bytes], at n places, no two alike."""
        parts = self._units(records).split_with_sizes(self._widths, 1)
        for field, part in zip(self._fields(pool), parts, strict=True):
            field[at.pages, at.offsets] = part

    def read_pages(self, pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Whole slices: pages int [n] -> uint8 [n, slice_bytes]."""
        return self._units(pool.view(len(pool), -1)).index_select(0, pages).view(torch.uint8)

    def write_pages(self, pool: torch.Tensor, pages: torch.Tensor, slices: torch.Tensor) -> None:
        """Put slices, uint8 [n, slice_bytes], at pages int64 [n], no two alike."""
        assert pool.is_contiguous()
        self._units(pool.view(len(pool), -1)).index_copy_(0, pages, self._units(slices))

    def _fields(self, pool: torch.Tensor) -> list[torch.Tensor]:
        """Views [pages, page_size, units of a token]."""
        assert pool.is_contiguous()
        parts = self._units(pool.view(len(pool), -1)).split_with_sizes(
            [width * self._page_size for width in self._widths], 1
        )
        return [part.view(len(pool), self._page_size, width) for part, width in zip(parts, self._widths, strict=True)]

    def _units(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of any dtype seen as units; a copy only where they are columns of something wider, as no pool is."""
        if rows.stride() != (rows.shape[1], 1):  # of one row or none too, which count as contiguous anywhere
            rows = rows.clone(memory_format=torch.contiguous_format)
        return rows.view(self._unit)


def grouped_records(page_size: int, num_kv_heads: int, head_dim: int, itemsize: int) -> PageRecords:
    """Of slices [2, page_size, G, head_dim]."""
    return PageRecords(page_size, [num_kv_heads * head_dim * itemsize] * 2)


def latent_records(page_size: int, token_bytes: int) -> PageRecords:
    """Of slices [page_size, one token's bytes]."""
    return PageRecords(page_size, [token_bytes])


def index_records(page_size: int, head_dim: int, itemsize: int, fp8: bool) -> PageRecords:
    """Of index keys; `fp8`: the page's codes, then a float32 scale a token."""
    return PageRecords(page_size, [head_dim, 4] if fp8 else [head_dim * itemsize])
