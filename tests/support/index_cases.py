"""Random paged index keys with queries, and their scores in float64: the judge of the index score kernels."""

from dataclasses import dataclass

import torch

from tests.support.latent_pools import read_index_keys


@dataclass(frozen=True, kw_only=True)
class IndexCase:
    """Rows of `num_keys` keys each, a query a row; what the pool does not use is NaN."""

    queries: torch.Tensor  # [n, I, E]; e4m3 with fp8 keys
    weights: torch.Tensor  # float32 [n, I], some negative
    keys: torch.Tensor
    page_table: torch.Tensor  # int32 [n, M]
    products: torch.Tensor  # float64 [n, I, num_keys] of row 0's keys with every query
    own: torch.Tensor  # float64 [n, num_keys]: each query's scores over its own row

    @property
    def scores(self) -> torch.Tensor:
        """float64 [n, num_keys]: each query's scores over row 0."""
        return (self.products.relu() * self.weights.double()[:, :, None]).sum(1)


def make_index_case(
    rows: int,
    num_keys: int,
    *,
    heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    fp8: bool = False,
    seed: int = 0,
) -> IndexCase:
    """A case with shuffled pages, queries strided as a slice of a wider projection is."""
    rng = torch.Generator().manual_seed(seed)
    pages = -(-num_keys // page_size)
    order = torch.randperm(rows * pages + 2, generator=rng)
    table = order[: rows * pages].view(rows, pages)
    wide = torch.randn(rows, heads, head_dim + 16, generator=rng)[:, :, :head_dim]
    weights = torch.randn(rows, heads, generator=rng)
    slots = (table[:, :, None] * page_size + torch.arange(page_size)).flatten(1)[:, :num_keys]
    raw = torch.full((len(order) * page_size, head_dim), float("nan"))
    raw[slots.flatten()] = torch.randn(rows * num_keys, head_dim, generator=rng)
    if fp8:
        codes = raw.to(torch.float8_e4m3fn).view(torch.uint8).view(len(order), -1)
        scales = (0.5 + torch.rand(len(order), page_size, generator=rng)).view(torch.uint8)
        keys = torch.cat([codes, scales], 1)
        queries = wide.to(torch.float8_e4m3fn)
    else:
        keys = raw.to(dtype).view(len(order), page_size, head_dim)
        queries = wide.to(dtype)
    held = read_index_keys(keys, slots, page_size).to(device)  # [rows, num_keys, E]
    exact = queries.to(torch.float32).double().to(device)
    weights = weights.to(device)
    own = (exact @ held.transpose(1, 2)).relu() * weights.double()[:, :, None]
    return IndexCase(
        queries=queries.to(device),
        weights=weights,
        keys=keys.to(device),
        page_table=table.to(torch.int32).to(device),
        products=exact @ held[0].T,
        own=own.sum(1),
    )
