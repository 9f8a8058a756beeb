"""The lightning indexer: scores and top-k."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernel_cases.case import (
    Case,
    Sizes,
    assert_near,
    e4m3,
    full_lens,
    index_pool,
    num_calls,
    page_tables,
    randn,
)
from benthic.kernels.index_scores import (
    index_scores_decode,
    index_scores_decode_reference,
    index_scores_prefill,
    index_scores_prefill_reference,
)
from benthic.kernels.topk_select import topk_select

CHECKED = 8  # queries or rows


def cases(sizes: Sizes) -> Iterator[Case]:
    """Scores of a prefill chunk and of decode in both key formats, then top-k of such scores."""
    for fp8 in (False, True):
        yield _prefill(sizes, fp8)
    for fp8 in (False, True):
        for batch in sizes.batches:
            yield _decode(sizes, fp8, batch)
    shapes = [(sizes.queries // 4, sizes.keys), (sizes.queries, sizes.context)]
    for rows, columns in [*shapes, *((batch, sizes.context) for batch in sizes.batches)]:
        yield _topk(sizes, rows, columns)


def _queries(sizes: Sizes, rows: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    queries = randn(rows, sizes.index_heads, sizes.index_dim, sizes=sizes)
    weights = randn(rows, sizes.index_heads, sizes=sizes, dtype=torch.float32)
    return (e4m3(queries) if fp8 else queries), weights


def _prefill(sizes: Sizes, fp8: bool) -> Case:
    """The last `queries` of a context of `keys`."""
    n, total = sizes.queries, sizes.keys
    first = total - n
    queries, weights = _queries(sizes, n, fp8)
    table = page_tables(1, total, sizes)
    keys = index_pool(table.numel(), fp8, sizes)
    out = torch.empty(n, total, device=sizes.device)

    def check() -> None:
        index_scores_prefill(queries, weights, keys, table[0], first, total, out)
        for start in (0, n - CHECKED):
            rows = slice(start, start + CHECKED)
            want = torch.empty(CHECKED, total, device=sizes.device)
            index_scores_prefill_reference(queries[rows], weights[rows], keys, table[0], first + start, total, want)
            seen = first + start + 1
            assert_near(out[rows, :seen], want[:, :seen], "index scores, prefill")

    pairs = n * first + n * (n + 1) / 2
    return Case(
        name=f"index_scores_prefill_{'fp8' if fp8 else 'bf16'}",
        calls=[partial(index_scores_prefill, queries, weights, keys, table[0], first, total, out)],
        check=check,
        flop=2 * sizes.index_heads * sizes.index_dim * pairs,
        limit="fp8" if fp8 else "bf16",
        graph=False,
        aim="≥ 900 TFLOP/s" if fp8 else "≥ 550 TFLOP/s",
    )


def _decode(sizes: Sizes, fp8: bool, batch: int) -> Case:
    table = page_tables(batch, sizes.context, sizes)
    lens = full_lens(batch, sizes.context, sizes)
    row_bytes = sizes.index_dim + 4 if fp8 else sizes.index_dim * sizes.dtype.itemsize
    num_bytes = batch * sizes.context * (row_bytes + 4)
    pools = [index_pool(table.numel(), fp8, sizes) for _ in range(num_calls(num_bytes, sizes.device))]
    queries, weights = _queries(sizes, batch, fp8)
    out = torch.empty(batch, sizes.context, device=sizes.device)

    def check() -> None:
        index_scores_decode(queries, weights, pools[0], table, lens, sizes.context, out)
        want = torch.empty_like(out)
        index_scores_decode_reference(queries, weights, pools[0], table, lens, sizes.context, want)
        assert_near(out, want, "index scores, decode")

    return Case(
        name=f"index_scores_decode_{'fp8' if fp8 else 'bf16'}_b{batch}",
        calls=[partial(index_scores_decode, queries, weights, keys, table, lens, sizes.context, out) for keys in pools],
        check=check,
        num_bytes=num_bytes,
        limit="copy",
        graph=True,
    )


def _topk(sizes: Sizes, rows: int, columns: int) -> Case:
    k = sizes.topk
    num_bytes = rows * columns * 4
    inputs = [
        torch.rand(rows, columns, device=sizes.device).sub_(0.2).relu_()  # a fifth are equal: zero
        for _ in range(num_calls(num_bytes, sizes.device))
    ]
    lens = full_lens(rows, columns, sizes)
    out = torch.empty(rows, k, dtype=torch.int32, device=sizes.device)

    def check() -> None:
        topk_select(inputs[0], lens, k, out)
        some = inputs[0][:CHECKED]
        want = some.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        assert torch.equal(out[:CHECKED].sort(-1).values.long(), want), "topk_select chose others"

    return Case(
        name=f"topk_select_{rows}x{columns}",
        calls=[partial(topk_select, scores, lens, k, out) for scores in inputs],
        check=check,
        num_bytes=num_bytes,
        limit="copy",
        graph=True,
        aim="≥ 33 % of the rate" if rows * columns > 1 << 24 else "",
        beside=("torch.topk", [partial(torch.topk, scores, k, -1, True, False) for scores in inputs]),
    )
