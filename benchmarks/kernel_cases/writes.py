"""Cache writes, query kernels, routing: what stands between the products, for one decode batch and one chunk."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_cases.case import Case, Sizes, assert_near, index_pool, latent_pool, randn, rope_table
from benthic.attention.latent import latent_bytes
from benthic.kernels.index_query import index_query, index_query_reference
from benthic.kernels.index_write import index_write, index_write_reference
from benthic.kernels.latent_step import IndexStep, latent_step, latent_step_reference
from benthic.kernels.latent_write import latent_write, latent_write_reference
from benthic.kernels.moe_route import moe_route, moe_route_reference
from benthic.kernels.narrow_linear import narrow_linear, narrow_linear_reference
from benthic.kernels.query_rope import query_rope, query_rope_reference
from benthic.kernels.query_step import query_step, query_step_reference


def cases(sizes: Sizes) -> Iterator[Case]:
    """Each kernel at the largest decode batch and at a chunk's tokens."""
    for tokens in (sizes.batches[-1], sizes.queries):
        for fp8 in (False, True):
            yield _latent_write(sizes, tokens, fp8)
            yield _index_write(sizes, tokens, fp8)
            yield _index_query(sizes, tokens, fp8)
            yield _latent_step(sizes, tokens, fp8)
            yield _query_step(sizes, tokens, fp8)
        yield _query_rope(sizes, tokens)
        yield _moe_route(sizes, tokens)
        yield _router(sizes, tokens)


def _case(name: str, run: Callable[[], object], check: Callable[[], None], num_bytes: float) -> Case:
    """The inputs of a layer's small kernels were written just before, so they are left in the cache."""
    return Case(name=name, calls=[run] * 8, check=check, num_bytes=num_bytes, limit="copy", graph=True)


def _places(sizes: Sizes, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rope table, positions and slots of `tokens` new tokens."""
    table = rope_table(sizes.keys, sizes)
    positions = torch.arange(tokens, device=sizes.device) + (sizes.keys - tokens) // 2
    return table, positions, torch.randperm(tokens, device=sizes.device)


def _same_bytes(written: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """fp8 pools are compared byte by byte: codes may differ by a step where rounding did."""
    if written.dtype == torch.uint8:
        different = (written != wanted).float().mean().item()
        assert different < 0.02, f"{what}: {different:.1%} of the bytes differ"
    else:
        assert_near(written, wanted, what)


def _latent_write(sizes: Sizes, tokens: int, fp8: bool) -> Case:
    projected = randn(tokens, sizes.rank + sizes.rope, sizes=sizes)
    weight = torch.ones(sizes.rank, device=sizes.device, dtype=sizes.dtype)
    pool = latent_pool(-(-tokens // sizes.page), fp8, sizes)
    places = _places(sizes, tokens)
    write = partial(latent_write, projected, weight, 1e-5, *places, pool, rank=sizes.rank)

    def check() -> None:
        wanted = pool.clone()
        latent_write_reference(projected, weight, 1e-5, *places, wanted, rank=sizes.rank)
        write()
        _same_bytes(pool, wanted, "latent_write")

    moved = tokens * (
        (sizes.rank + sizes.rope) * sizes.dtype.itemsize
        + latent_bytes(sizes.rank, sizes.rope, sizes.dtype.itemsize, fp8)
    )
    return _case(f"latent_write{'_fp8' if fp8 else ''}_t{tokens}", write, check, moved)


def _index_write(sizes: Sizes, tokens: int, fp8: bool) -> Case:
    projected = randn(tokens, sizes.index_dim, sizes=sizes)
    weight = torch.ones(sizes.index_dim, device=sizes.device, dtype=sizes.dtype)
    pool = index_pool(-(-tokens // sizes.page), fp8, sizes)
    options: dict[str, Any] = {"page_size": sizes.page, "interleaved": True}
    arguments = (projected, weight, torch.zeros_like(weight), *_places(sizes, tokens))
    write = partial(index_write, *arguments, pool, **options)

    def check() -> None:
        wanted = pool.clone()
        index_write_reference(*arguments, wanted, **options)
        write()
        _same_bytes(pool, wanted, "index_write")

    itemsize = sizes.dtype.itemsize
    moved = tokens * sizes.index_dim * (itemsize + (1 if fp8 else itemsize)) + (4 * tokens if fp8 else 0)
    return _case(f"index_write{'_fp8' if fp8 else ''}_t{tokens}", write, check, moved)


def _index_query(sizes: Sizes, tokens: int, fp8: bool) -> Case:
    queries = randn(tokens, sizes.index_heads, sizes.index_dim, sizes=sizes)
    weights = randn(tokens, sizes.index_heads, sizes=sizes, dtype=torch.float32)
    table, positions, _ = _places(sizes, tokens)
    options: dict[str, Any] = {"rope_dim": sizes.rope, "interleaved": True, "fp8": fp8}

    def check() -> None:
        got, scaled = index_query(queries.clone(), weights, table, positions, **options)
        want, wanted = index_query_reference(queries.clone(), weights, table, positions, **options)
        assert_near(got, want, "index_query", 0.072 if fp8 else 2e-2)  # the largest step of e4m3: 32 of 448
        assert_near(scaled, wanted, "index_query's weights")

    itemsize = sizes.dtype.itemsize
    moved = tokens * sizes.index_heads * sizes.index_dim * (itemsize + (1 if fp8 else itemsize))
    run = partial(index_query, queries, weights, table, positions, **options)
    return _case(f"index_query{'_fp8' if fp8 else ''}_t{tokens}", run, check, moved)


def _latent_step(sizes: Sizes, tokens: int, fp8: bool) -> Case:
    """Query norm, latent write and index write in one launch."""
    columns = (sizes.q_rank, sizes.rank + sizes.rope, sizes.index_dim)
    product = randn(tokens, sum(columns), sizes=sizes)
    ones = torch.ones(max(columns), device=sizes.device, dtype=sizes.dtype)
    norms = (ones[: sizes.q_rank], ones[: sizes.rank], 1e-5)
    places = _places(sizes, tokens)
    pages = -(-tokens // sizes.page)
    latents, keys = latent_pool(pages, fp8, sizes), index_pool(pages, fp8, sizes)
    weight = ones[: sizes.index_dim]

    def index(pool: torch.Tensor) -> IndexStep:
        return IndexStep(
            weight=weight, bias=torch.zeros_like(weight), keys=pool, page_size=sizes.page, interleaved=True
        )

    run = partial(latent_step, product, *norms, *places, latents, rank=sizes.rank, index=index(keys))

    def check() -> None:
        wanted = latents.clone(), keys.clone()
        want = latent_step_reference(product, *norms, *places, wanted[0], rank=sizes.rank, index=index(wanted[1]))
        assert_near(run(), want, "latent_step's queries")
        _same_bytes(latents, wanted[0], "latent_step's latents")
        _same_bytes(keys, wanted[1], "latent_step's keys")

    itemsize = sizes.dtype.itemsize
    written = latent_bytes(sizes.rank, sizes.rope, itemsize, fp8) + sizes.index_dim * (1 if fp8 else itemsize)
    moved = tokens * ((sum(columns) + sizes.q_rank) * itemsize + written)
    return _case(f"latent_step{'_fp8' if fp8 else ''}_t{tokens}", run, check, moved)


def _query_step(sizes: Sizes, tokens: int, fp8: bool) -> Case:
    """Attention's and the indexer's queries in one launch."""
    heads, head_dim = sizes.heads[0], sizes.nope + sizes.rope
    product = randn(tokens, heads * head_dim + sizes.index_heads * sizes.index_dim, sizes=sizes)
    weights = randn(tokens, sizes.index_heads, sizes=sizes, dtype=torch.float32)
    table, positions, _ = _places(sizes, tokens)
    options: dict[str, Any] = {
        "num_heads": heads, "head_dim": head_dim, "rope_dim": sizes.rope, "interleaved": True, "fp8": fp8,
    }  # fmt: skip

    def check() -> None:
        turned, wanted = product.clone(), product.clone()
        got, scaled, _ = query_step(turned, weights, table, positions, **options)
        want, want_scaled, _ = query_step_reference(wanted, weights, table, positions, **options)
        assert_near(got, want, "query_step", 0.072 if fp8 else 2e-2)
        assert_near(scaled, want_scaled, "query_step's weights")
        assert_near(turned[:, : heads * head_dim], wanted[:, : heads * head_dim], "query_step's heads")

    itemsize = sizes.dtype.itemsize
    moved = tokens * (
        2 * heads * sizes.rope * itemsize + sizes.index_heads * sizes.index_dim * (itemsize + (1 if fp8 else itemsize))
    )
    run = partial(query_step, product, weights, table, positions, **options)
    return _case(f"query_step{'_fp8' if fp8 else ''}_t{tokens}", run, check, moved)


def _query_rope(sizes: Sizes, tokens: int) -> Case:
    q = randn(tokens, sizes.heads[0], sizes.nope + sizes.rope, sizes=sizes)
    table, positions, _ = _places(sizes, tokens)

    def check() -> None:
        got, want = q.clone(), q.clone()
        query_rope(got, table, positions, rope_dim=sizes.rope)
        query_rope_reference(want, table, positions, rope_dim=sizes.rope)
        assert_near(got, want, "query_rope")

    moved = 2 * tokens * sizes.heads[0] * sizes.rope * sizes.dtype.itemsize
    return _case(f"query_rope_t{tokens}", partial(query_rope, q, table, positions, rope_dim=sizes.rope), check, moved)


def _moe_route(sizes: Sizes, tokens: int) -> Case:
    logits = randn(tokens, sizes.num_experts, sizes=sizes, dtype=torch.float32)
    bias = torch.rand(sizes.num_experts, device=sizes.device) * 0.1
    options: dict[str, Any] = {"k": sizes.chosen, "num_groups": 1, "topk_groups": 1, "norm": True, "scaling": 2.5}

    def check() -> None:
        (got, shares), (want, wanted) = moe_route(logits, bias, **options), moe_route_reference(logits, bias, **options)
        assert (got != want).float().mean().item() < 1e-3, "moe_route chose other experts"
        assert_near(shares, wanted, "moe_route's weights")

    moved = tokens * (sizes.num_experts * 4 + sizes.chosen * 8)
    return _case(f"moe_route_t{tokens}", partial(moe_route, logits, bias, **options), check, moved)


def _router(sizes: Sizes, tokens: int) -> Case:
    x = randn(tokens, sizes.hidden, sizes=sizes)
    weight = randn(sizes.num_experts, sizes.hidden, sizes=sizes)

    def check() -> None:
        assert_near(narrow_linear(x, weight), narrow_linear_reference(x, weight), "narrow_linear", 1e-3)

    moved = (x.numel() + weight.numel()) * sizes.dtype.itemsize + tokens * sizes.num_experts * 4
    return _case(f"narrow_linear_t{tokens}", partial(narrow_linear, x, weight), check, moved)
