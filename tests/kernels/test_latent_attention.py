"""latent_prefill and latent_decode: Triton and the reference against float64."""

import pytest
import torch

from benthic.kernels.latent_decode import latent_decode, latent_decode_reference
from benthic.kernels.latent_decode.kernel import latent_decode_triton
from benthic.kernels.latent_prefill import latent_prefill, latent_prefill_reference
from benthic.kernels.latent_prefill.kernel import latent_prefill_triton
from benthic.kernels.latent_tiles import LatentTiles, num_latent_splits
from tests.support.attention_cases import assert_close
from tests.support.latent_cases import LatentCase, make_latent_case
from tests.support.triton_interpreter import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLAIN, TURNED = LatentTiles(16, 16, 4, 2), LatentTiles(16, 16, 4, 2, turned=True)


def case_of(seq_lens: list[int], query_lens: list[int], dtype: torch.dtype = torch.float32, **sizes: int) -> LatentCase:
    given = {"heads": 4, "rank": 32, "rope_dim": 16, "page_size": 4, "topk": 21} | sizes
    return make_latent_case(seq_lens, query_lens, dtype=dtype, device=DEVICE, **given)  # type: ignore[arg-type]


def prefill_both(case: LatentCase, dtype: torch.dtype, tiles: LatentTiles | None, row: int = 0) -> None:
    """Sparse and dense, Triton and reference, of a case with one row."""
    first = int(case.seq_lens[row]) - case.q_latent.shape[0]
    for function in (latent_prefill_triton, latent_prefill_reference):
        extra = {"tiles": tiles} if function is latent_prefill_triton else {}
        for selected, expected in ((case.selected, case.expected), (None, case.dense)):
            out = torch.empty_like(case.q_latent)
            args = (case.q_latent, case.q_rope, case.latents, case.page_table[row], first, selected, case.scale, out)
            assert function(*args, rank=case.rank, **extra) is out
            assert_close(out, expected, dtype)


def decode_both(case: LatentCase, dtype: torch.dtype, tiles: LatentTiles | None, splits: int | None) -> None:
    """Sparse and dense, Triton and reference, of a case with one query a row."""
    for function in (latent_decode_triton, latent_decode_reference):
        extra = {"tiles": tiles, "splits": splits} if function is latent_decode_triton else {}
        for selected, expected in ((case.selected, case.expected), (None, case.dense)):
            out = torch.empty_like(case.q_latent)
            args = (case.q_latent, case.q_rope, case.latents, case.page_table, case.seq_lens, selected, 4096)
            assert function(*args, case.scale, out, rank=case.rank, **extra) is out
            assert_close(out, expected, dtype)


@pytest.mark.parametrize("tiles", [PLAIN, TURNED])
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(4, 32, 16), (5, 16, 8), (17, 24, 12)])
def test_prefill_agrees_for_odd_sizes(heads: int, rank: int, rope_dim: int, tiles: LatentTiles) -> None:
    case = case_of([39], [9], heads=heads, rank=rank, rope_dim=rope_dim)
    prefill_both(case, torch.float32, tiles)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tiles", [PLAIN, TURNED])
def test_prefill_agrees_for_both_pools(tiles: LatentTiles, fp8: bool, dtype: torch.dtype) -> None:
    prefill_both(case_of([37], [5], dtype, page_size=16, topk=33, fp8=fp8), dtype, tiles)


def test_fp8_scales_belong_to_their_128_latents() -> None:
    case = case_of([20], [3], rank=256, fp8=True)
    prefill_both(case, torch.float32, PLAIN)
    decode_both(case_of([20, 3], [1, 1], rank=256, fp8=True), torch.float32, TURNED, 2)


def test_prefill_from_the_first_token() -> None:
    """Selections of early queries are mostly -1; the very first has one position."""
    prefill_both(case_of([19], [19], topk=7), torch.float32, TURNED)
    prefill_both(case_of([1], [1], topk=50), torch.float32, PLAIN)


def test_a_selection_may_end_before_the_positions_do() -> None:
    """Draft rounds reuse a selection made earlier: fewer entries than positions."""
    case = case_of([40], [2], topk=32)
    case.selected[:, 17:] = -1
    args = (case.q_latent, case.q_rope, case.latents, case.page_table[0], 38, case.selected, case.scale)
    expected = latent_prefill_reference(*args, torch.empty_like(case.q_latent), rank=32)
    out = latent_prefill_triton(*args, torch.empty_like(case.q_latent), rank=32, tiles=PLAIN)
    assert_close(out, expected.double(), torch.float32)
    pair = (case.page_table.expand(2, -1), torch.tensor([39, 40], dtype=torch.int32, device=DEVICE), case.selected)
    out = torch.empty_like(case.q_latent)
    latent_decode_triton(
        case.q_latent, case.q_rope, case.latents, *pair, 64, case.scale, out, rank=32, tiles=PLAIN, splits=4
    )
    assert_close(out, expected.double(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_both_agree_with_the_table_s_tiles(fp8: bool, dtype: torch.dtype) -> None:
    prefill_both(case_of([70], [3], dtype, heads=20, page_size=16, topk=65, fp8=fp8), dtype, None)
    decode_both(case_of([70, 1], [1, 1], dtype, heads=20, page_size=16, topk=65, fp8=fp8), dtype, None, None)


@pytest.mark.parametrize("tiles", [PLAIN, TURNED])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_decode_agrees_for_every_number_of_splits(splits: int, tiles: LatentTiles) -> None:
    case = case_of([1, 15, 16, 17, 65], [1] * 5, heads=5, topk=40)
    decode_both(case, torch.float32, tiles, splits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_decode_agrees_for_both_pools(fp8: bool, dtype: torch.dtype) -> None:
    case = case_of([1, 31, 33, 50], [1] * 4, dtype, rank=16, rope_dim=8, page_size=16, fp8=fp8)
    decode_both(case, dtype, PLAIN, 4)


def test_large_logits_make_no_nan() -> None:
    case = case_of([30], [4])
    case.q_latent.mul_(1e4)
    args = (case.q_latent, case.q_rope, case.latents, case.page_table[0], 26, case.selected, case.scale)
    expected = latent_prefill_reference(*args, torch.empty_like(case.q_latent), rank=32)
    out = latent_prefill_triton(*args, torch.empty_like(case.q_latent), rank=32, tiles=PLAIN)
    assert_close(out, expected.double(), torch.float32)


def test_no_query_is_no_work() -> None:
    case = case_of([5], [1])
    none = case.q_latent[:0], case.q_rope[:0], case.latents
    out, nothing = torch.empty_like(none[0]), case.selected[:0]
    assert latent_prefill_triton(*none, case.page_table[0], 0, nothing, 1.0, out, rank=32) is out
    rows = case.page_table[:0], case.seq_lens[:0], nothing
    assert latent_decode_triton(*none, *rows, 64, 1.0, out, rank=32) is out


def test_splits_fill_the_device_and_stay_worth_their_merge() -> None:
    assert num_latent_splits(1, 1, 10, torch.device("cpu")) == 1
    assert num_latent_splits(1, 1, 1 << 20, torch.device("cpu")) == 4
    assert num_latent_splits(64, 2, 1 << 20, torch.device("cpu")) == 1


def test_shapes_that_do_not_fit_are_named() -> None:
    case = case_of([8, 8], [1, 1])
    q, rope, pool = case.q_latent, case.q_rope, case.latents
    row, lens = case.page_table[0], case.seq_lens
    with pytest.raises(ValueError, match=r"are not \[T, H, 16\]"):
        latent_prefill(q, rope, pool, row, 0, None, 1.0, rank=16)
    with pytest.raises(ValueError, match=r"are not \[pages, page_size, 40\]"):
        latent_prefill(q, rope[..., :8], pool, row, 0, None, 1.0, rank=32)
    with pytest.raises(ValueError, match=r"latents are torch.float32, queries torch.float16"):
        latent_prefill(q.half(), rope.half(), pool, row, 0, None, 1.0, rank=32)
    with pytest.raises(ValueError, match=r"is not int32 \[2, K >= 1\]"):
        latent_decode(q, rope, pool, case.page_table, lens, case.selected[:1], 8, 1.0, rank=32)
    with pytest.raises(ValueError, match="do not have the 2 rows"):
        latent_decode(q, rope, pool, case.page_table, lens[:1], None, 8, 1.0, rank=32)
    with pytest.raises(ValueError, match="is not one row"):
        latent_prefill(q, rope, pool, case.page_table, 0, None, 1.0, rank=32)
    with pytest.raises(ValueError, match="page size 3"):
        latent_prefill(q, rope, pool[:, :3], row, 0, None, 1.0, rank=32)
