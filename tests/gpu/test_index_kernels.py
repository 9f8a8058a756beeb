"""index_scores and topk_select, compiled, at real sizes: against float64 and against a stable sort."""

import math

import pytest
import torch

from benthic.kernels.index_scores import index_scores_decode, index_scores_prefill
from benthic.kernels.topk_select import topk_select
from tests.support.index_cases import IndexCase, make_index_case
from tests.support.topk_cases import SCORES, make_scores

pytestmark = pytest.mark.gpu
FORMATS = [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)]


def _assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """fp8 products are summed with some 14 bits by the tensor cores."""
    assert actual.shape == expected.shape
    assert not len(expected) or ((actual.double() - expected).abs() <= 1e-3 * expected.abs().max()).all()


def _prefill(case: IndexCase, num_keys: int, start: int = 0, end: int | None = None) -> torch.Tensor:
    queries, weights = case.queries[start:end], case.weights[start:end]
    first = num_keys - case.queries.shape[0] + start
    seen = first + len(queries)
    out = torch.full((len(queries), num_keys), math.nan, device=queries.device)
    index_scores_prefill(queries, weights, case.keys, case.page_table[0], first, seen, out)
    return out


@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 32), (8, 64), (32, 128), (64, 128)])
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_scores(page_size: int, heads: int, head_dim: int, dtype: torch.dtype, fp8: bool, cuda: torch.device) -> None:
    num_keys = 1500
    case = make_index_case(
        12, num_keys, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype, device=cuda, fp8=fp8
    )
    out = _prefill(case, num_keys)
    for query in range(12):
        seen = num_keys - 11 + query
        _assert_near(out[query, :seen], case.scores[query, :seen])
    lens = [1, 2, 63, 64, 65, 127, 128, 129, 255, 1000, 1499, 1500]
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=cuda)
    for bound in (1500, 131072):  # the bound only shapes the launch
        out = torch.full((12, bound), math.nan, device=cuda)
        index_scores_decode(case.queries, case.weights, case.keys, case.page_table, seq_lens, bound, out, skip_below=63)
        for row, length in enumerate(lens):
            scored = length if length > 63 else 0
            _assert_near(out[row, :scored], case.own[row, :scored])
            assert out[row, scored:].isnan().all()


@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
def test_scores_do_not_depend_on_chunk_or_batch(dtype: torch.dtype, fp8: bool, cuda: torch.device) -> None:
    case = make_index_case(40, 700, heads=32, head_dim=128, page_size=64, dtype=dtype, device=cuda, fp8=fp8)
    whole = _prefill(case, 700)
    for start, end in ((0, 1), (1, 8), (8, 39), (39, 40)):
        part = _prefill(case, 700, start, end)
        for query in range(start, end):
            seen = 661 + query
            assert torch.equal(part[query - start, :seen], whole[query, :seen])
    lens = torch.full((40,), 700, dtype=torch.int32, device=cuda)
    batch, alone = torch.empty(40, 700, device=cuda), torch.empty(1, 4096, device=cuda)
    index_scores_decode(case.queries, case.weights, case.keys, case.page_table, lens, 700, batch)
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        args = (case.queries[one], case.weights[one], case.keys, case.page_table[one], lens[one])
        index_scores_decode(*args, 4096, alone)
        assert torch.equal(alone[0, :700], batch[row])


def test_scores_past_two_to_the_31(cuda: torch.device) -> None:
    """The last pages of a pool of 2.2 G elements, and rows of scores that lie as far apart."""
    pages, n, stride = 270_000, 16, 1 << 28
    if torch.cuda.mem_get_info(cuda)[0] < 30e9:
        pytest.skip("needs 30 GB of free device memory")
    case = make_index_case(n, 64, heads=32, head_dim=128, page_size=64, dtype=torch.bfloat16, device=cuda)
    keys = torch.empty(pages, 64, 128, dtype=torch.bfloat16, device=cuda)
    keys[pages - len(case.keys) :] = case.keys
    table = case.page_table + (pages - len(case.keys))
    out = torch.empty(n * stride, device=cuda).view(n, stride)
    index_scores_prefill(case.queries, case.weights, keys, table[0], 64 - n, 64, out)
    _assert_near(out[n - 1, :64], case.scores[n - 1])
    lens = torch.full((n,), 64, dtype=torch.int32, device=cuda)
    index_scores_decode(case.queries, case.weights, keys, table, lens, 64, out)
    _assert_near(out[:, :64], case.own)
    chosen, expected = topk_select(out, lens, 16)[n - 1], topk_select(out[n - 1 :, :64], lens[:1], 16)[0]
    assert torch.equal(chosen.sort().values, expected.sort().values)


def _assert_selected(scores: torch.Tensor, lens: torch.Tensor, k: int) -> None:
    out = topk_select(scores, lens, k)
    inside = torch.arange(scores.shape[1], device=scores.device) < lens[:, None]
    order = torch.where(inside, -scores, math.nan).sort(dim=1, stable=True).indices[:, :k].sort(1).values
    longer = lens > k
    assert torch.equal(out[longer].sort(1).values.long(), order[longer])
    places = torch.arange(k, dtype=torch.int32, device=scores.device)
    assert torch.equal(out[~longer], torch.where(places < lens[~longer, None], places, -1))


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 3000), (1, 8192), (1, 32768), (3, 131072), (70, 100_000), (300, 5001), (500, 40_000)]
)
def test_selection(rows: int, width: int, kind: str, cuda: torch.device) -> None:
    scores = make_scores(kind, rows, width).to(cuda)
    lens = torch.randint(0, width + 1, (rows,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    lens[0] = width
    for k in (16, 256, 2048):
        lens[1:4] = torch.tensor([k - 1, k, k + 1])[: max(0, rows - 1)]
        _assert_selected(scores, lens.to(cuda), k)


def test_selection_of_strided_rows(cuda: torch.device) -> None:
    for stride in (9000, 9001, 9008):
        scores = make_scores("ties", 200, stride).to(cuda)[:, :8999]
        scores[:, 8500:] = math.nan  # behind every length
        _assert_selected(scores, torch.full((200,), 8500, dtype=torch.int32, device=cuda), 2048)


def test_a_graph_scores_and_selects_for_lengths_that_change(cuda: torch.device) -> None:
    case = make_index_case(3, 4000, heads=32, head_dim=128, page_size=64, dtype=torch.bfloat16, device=cuda)
    bound, k = 131072, 256
    lens = torch.full((3,), 4000, dtype=torch.int32, device=cuda)
    scores = torch.empty(3, bound, device=cuda)
    out = torch.empty(3, k, dtype=torch.int32, device=cuda)
    table = torch.zeros(3, bound // 64, dtype=torch.int32, device=cuda)
    table[:, : case.page_table.shape[1]] = case.page_table

    def step() -> None:
        index_scores_decode(case.queries, case.weights, case.keys, table, lens, bound, scores, skip_below=k)
        topk_select(scores, lens, k, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([4000, 1, 257], [256, 3999, 255], [2000, 2001, 2002]):
        lens.copy_(torch.tensor(lengths))
        graph.replay()
        replayed = out.clone()
        for row, length in enumerate(lengths):
            expected = case.own[row, :length].topk(min(k, length)).indices.sort().values
            assert torch.equal(replayed[row, : min(k, length)].sort().values.long(), expected)
            assert (replayed[row, length:] == -1).all()
