"""Attention over latents: sparse and dense, prefill and decode."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernel_cases.case import (
    Case,
    Sizes,
    assert_near,
    full_lens,
    latent_pool,
    num_calls,
    page_tables,
    randn,
)
from benthic.attention.latent import latent_bytes
from benthic.kernels.latent_decode import latent_decode, latent_decode_reference
from benthic.kernels.latent_prefill import latent_prefill, latent_prefill_reference
from benthic.kernels.topk_select import topk_select

CHECKED = 8  # queries
SPARSE_QUERIES = 4096  # of a prefill: more would only take longer


def cases(sizes: Sizes) -> Iterator[Case]:
    """Prefill by head counts, then decode by batches, bf16 and fp8 latents."""
    for heads in sizes.heads:
        for fp8 in (False, True):
            yield _prefill(sizes, heads, fp8, dense=False)
    yield _prefill(sizes, sizes.heads[0], False, dense=True)
    for fp8 in (False, True):
        for batch in sizes.batches:
            yield _decode(sizes, sizes.heads[0], fp8, batch, dense=False)
    for batch in sizes.batches:
        yield _decode(sizes, sizes.heads[0], False, batch, dense=True)


def _name(what: str, heads: int, fp8: bool, dense: bool) -> str:
    return f"{'dense' if dense else 'sparse'}_{what}_h{heads}{'_fp8' if fp8 else ''}"


def _random_selection(rows: int, total: int, first: int, sizes: Sizes) -> torch.Tensor:
    """int32 [rows, K]: random positions of `total`, as `topk_select` hands them on, at most each row's own."""
    scores = torch.rand(rows, total, device=sizes.device)
    lens = torch.arange(first + 1, first + rows + 1, device=sizes.device).clamp_(max=total).to(torch.int32)
    return topk_select(scores, lens, sizes.topk, None)


def _prefill(sizes: Sizes, heads: int, fp8: bool, *, dense: bool) -> Case:
    """Sparse: the last queries of a context of `keys`. Dense: a whole prompt of `context`."""
    total = sizes.context if dense else sizes.keys
    n = total if dense else min(SPARSE_QUERIES, sizes.queries)
    first = total - n
    table = page_tables(1, total, sizes)
    pool = latent_pool(table.numel(), fp8, sizes)
    q_latent = randn(n, heads, sizes.rank, sizes=sizes)
    q_rope = randn(n, heads, sizes.rope, sizes=sizes)
    selected = None if dense else _random_selection(n, total, first, sizes)
    scale = (sizes.nope + sizes.rope) ** -0.5
    out = torch.empty_like(q_latent)

    def check() -> None:
        latent_prefill(q_latent, q_rope, pool, table[0], first, selected, scale, out, rank=sizes.rank)
        for start in (0, n - CHECKED):
            rows = slice(start, start + CHECKED)
            chosen = None if selected is None else selected[rows]
            want = latent_prefill_reference(
                q_latent[rows], q_rope[rows], pool, table[0], first + start, chosen, scale,
                torch.empty_like(q_latent[rows]), rank=sizes.rank,
            )  # fmt: skip
            assert_near(out[rows], want, _name("prefill", heads, fp8, dense))

    pairs = n * (n + 1) / 2 if dense else n * sizes.topk
    return Case(
        name=_name("prefill", heads, fp8, dense),
        calls=[partial(latent_prefill, q_latent, q_rope, pool, table[0], first, selected, scale, out, rank=sizes.rank)],
        check=check,
        flop=2 * heads * (2 * sizes.rank + sizes.rope) * pairs,
        limit="bf16",
        graph=False,
        aim="" if dense or fp8 else "≥ 300 TFLOP/s" if heads <= 32 else "> that of 32 heads",
    )


def _decode(sizes: Sizes, heads: int, fp8: bool, batch: int, *, dense: bool) -> Case:
    """One query a row over a context of `context`."""
    table = page_tables(batch, sizes.context, sizes)
    lens = full_lens(batch, sizes.context, sizes)
    entry = latent_bytes(sizes.rank, sizes.rope, sizes.dtype.itemsize, fp8)
    read = sizes.context * entry if dense else sizes.topk * (entry + 4)
    num_bytes = batch * (read + heads * (2 * sizes.rank + sizes.rope) * sizes.dtype.itemsize)
    # separate pools of whole contexts, of which a sparse call reads a part
    pools = [latent_pool(table.numel(), fp8, sizes) for _ in range(num_calls(num_bytes, sizes.device))]
    q_latent = randn(batch, heads, sizes.rank, sizes=sizes)
    q_rope = randn(batch, heads, sizes.rope, sizes=sizes)
    selected = None if dense else _random_selection(batch, sizes.context, sizes.context, sizes)
    scale = (sizes.nope + sizes.rope) ** -0.5
    out = torch.empty_like(q_latent)
    attend = partial(latent_decode, q_latent, q_rope)
    rest = (table, lens, selected, sizes.context, scale)

    def check() -> None:
        attend(pools[0], *rest, out, rank=sizes.rank)
        want = latent_decode_reference(q_latent, q_rope, pools[0], *rest, torch.empty_like(q_latent), rank=sizes.rank)
        assert_near(out, want, _name("decode", heads, fp8, dense))

    return Case(
        name=f"{_name('decode', heads, fp8, dense)}_b{batch}",
        calls=[partial(attend, pool, *rest, out, rank=sizes.rank) for pool in pools],
        check=check,
        num_bytes=num_bytes,
        limit="copy",
        graph=True,
        aim="≥ 75 % of the rate" if not dense else "",
    )
