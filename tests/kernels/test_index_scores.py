"""index_scores_prefill and index_scores_decode: Triton and the reference against float64."""

import pytest
import torch

from benthic.kernels.index_scores import (
    index_scores_decode,
    index_scores_decode_reference,
    index_scores_prefill,
    index_scores_prefill_reference,
    queries_per_pass,
)
from benthic.kernels.index_scores.kernel import index_scores_decode_triton, index_scores_prefill_triton
from benthic.kernels.index_scores.tiles import ScoreTiles
from tests.support.index_cases import IndexCase, make_index_case
from tests.support.triton_interpreter import DEVICE

FORMATS = [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)]
SMALL = ScoreTiles(16, 64, 4, 2)
UNTOUCHED = 12345.0


def _case(rows: int, num_keys: int, heads: int, head_dim: int, page_size: int, **more: object) -> IndexCase:
    return make_index_case(
        rows, num_keys, heads=heads, head_dim=head_dim, page_size=page_size, device=DEVICE,
        **{"dtype": torch.float32, **more},
    )  # fmt: skip


def _prefill(score: object, case: IndexCase, num_keys: int, *more: object) -> None:
    """Row 0's last queries; checked where a query sees something, and that nothing lies behind the keys."""
    queries = case.queries.shape[0]
    first = num_keys - queries
    out = torch.full((queries, num_keys + 3), UNTOUCHED, device=DEVICE)
    score(case.queries, case.weights, case.keys, case.page_table[0], first, num_keys, out, *more)
    assert (out[:, num_keys:] == UNTOUCHED).all()
    for query in range(queries):
        seen = first + query + 1
        torch.testing.assert_close(out[query, :seen].double(), case.scores[query, :seen], atol=1e-4, rtol=1e-5)


def _decode(score: object, case: IndexCase, lens: list[int], bound: int, skip: int, *more: object) -> None:
    out = torch.full((len(lens), bound + 2), UNTOUCHED, device=DEVICE)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    score(case.queries, case.weights, case.keys, case.page_table, seq_lens, bound, out, *more)
    for row, length in enumerate(lens):
        scored = length if length > skip else 0
        torch.testing.assert_close(out[row, :scored].double(), case.own[row, :scored], atol=1e-4, rtol=1e-5)
        assert (out[row, scored:] == UNTOUCHED).all()


@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (4, 32), (5, 24), (32, 32)])
def test_prefill_agrees_for_every_shape_of_heads(heads: int, head_dim: int, dtype: torch.dtype, fp8: bool) -> None:
    case = _case(7, 70, heads, head_dim, 16, dtype=dtype, fp8=fp8)
    _prefill(index_scores_prefill_triton, case, 70, SMALL, 2)
    _prefill(index_scores_prefill_reference, case, 70)
    _prefill(index_scores_prefill, case, 70)


@pytest.mark.parametrize("page_size", [4, 8, 16, 64])
@pytest.mark.parametrize(("queries", "num_keys"), [(1, 1), (1, 65), (9, 9), (5, 64), (11, 50)])
def test_prefill_agrees_for_every_page_size(queries: int, num_keys: int, page_size: int) -> None:
    _prefill(index_scores_prefill_triton, _case(queries, num_keys, 4, 32, page_size), num_keys, SMALL, 1)


@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
def test_the_tables_tiles_agree(dtype: torch.dtype, fp8: bool) -> None:
    case = _case(6, 150, 8, 128, 64, dtype=dtype, fp8=fp8)
    _prefill(index_scores_prefill_triton, case, 150)
    _decode(index_scores_decode_triton, case, [1, 64, 65, 128, 150, 3], 150, 0)


@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.parametrize("parts", [1, 3, 40])
def test_decode_agrees_for_every_number_of_parts(parts: int, page_size: int, dtype: torch.dtype, fp8: bool) -> None:
    case = _case(5, 90, 5, 32, page_size, dtype=dtype, fp8=fp8)
    lens = [1, 16, 17, 63, 90]
    _decode(index_scores_decode_triton, case, lens, 200, 16, 16, ScoreTiles(16, 16, 4, 2), parts)
    _decode(index_scores_decode_reference, case, lens, 200, 16, 16)


@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.parametrize("ahead", [False, True])
def test_pages_looked_up_ahead_or_not_agree(ahead: bool, page_size: int) -> None:
    """The table ends with the last tile."""
    case = _case(9, 90, 5, 32, page_size)
    _prefill(index_scores_prefill_triton, case, 90, ScoreTiles(16, 64, 4, 2, ahead), 2)
    tiles = ScoreTiles(16, 16, 4, 2, ahead)
    _decode(index_scores_decode_triton, case, [1, 16, 17, 63, 90, 3, 5, 9, 64], 90, 0, 0, tiles, 3)


def test_nothing_to_score_is_fine() -> None:
    case = _case(3, 20, 4, 32, 16)
    out = torch.full((3, 20), UNTOUCHED, device=DEVICE)
    index_scores_prefill_triton(case.queries[:0], case.weights[:0], case.keys, case.page_table[0], 0, 0, out[:0])
    lens = torch.tensor([0, 0, 7], dtype=torch.int32, device=DEVICE)
    index_scores_decode_triton(case.queries, case.weights, case.keys, case.page_table, lens, 20, out, 7)
    assert (out == UNTOUCHED).all()


@pytest.mark.parametrize("num_keys", [1, 1000, 1 << 20])
def test_a_pass_stays_in_its_budget(num_keys: int) -> None:
    budget = 32 << 20
    queries = queries_per_pass(num_keys, budget)
    assert 4 * queries * num_keys <= budget < 4 * (queries + 1) * num_keys
    assert queries_per_pass(num_keys, 0) == 1


def test_shapes_that_do_not_fit_are_named() -> None:
    case = _case(2, 20, 4, 32, 16)
    table, lens = case.page_table, torch.ones(2, dtype=torch.int32)
    out = torch.empty(2, 20)
    with pytest.raises(ValueError, match="do not fit keys"):
        index_scores_prefill(case.queries[:, :, :16], case.weights, case.keys, table[0], 18, 20, out)
    with pytest.raises(ValueError, match="too short for 40 keys"):
        index_scores_prefill(case.queries, case.weights, case.keys, table[0], 38, 40, out)
    with pytest.raises(ValueError, match="of up to 30 keys"):
        index_scores_decode(case.queries, case.weights, case.keys, table, lens, 30, out)
    with pytest.raises(ValueError, match="must be float32"):
        index_scores_decode(case.queries, case.weights.half(), case.keys, table, lens, 20, out)
    with pytest.raises(ValueError, match="power of two"):
        index_scores_decode(case.queries, case.weights, case.keys[:, :12], table, lens, 20, out)
