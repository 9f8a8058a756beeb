"""paged_write, paged_decode and paged_prefill: Triton and the reference against float64."""

import pytest
import torch

from benthic.kernels.paged_decode import paged_decode, paged_decode_reference
from benthic.kernels.paged_decode.kernel import paged_decode_triton
from benthic.kernels.paged_prefill import paged_prefill, paged_prefill_reference
from benthic.kernels.paged_prefill.kernel import paged_prefill_triton
from benthic.kernels.paged_write import paged_write, paged_write_reference
from benthic.kernels.paged_write.kernel import paged_write_triton
from benthic.kernels.tiles import Tiles
from tests.support.attention_cases import assert_close, make_case
from tests.support.triton_interpreter import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = Tiles(16, 16, 4, 2)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8])
def test_decode_agrees_for_every_group_size(group: int, page_size: int) -> None:
    case = make_case(
        [1, 15, 16, 17, 65], [1] * 5, heads=2 * group, kv_heads=2, head_dim=16, page_size=page_size,
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    out = torch.empty_like(case.q)
    paged_decode_triton(case.q, case.kv, case.page_table, case.seq_lens, case.scale, case.max_seq_len, out, SMALL, 2)
    assert_close(out, case.expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_decode_agrees_for_every_number_of_splits(splits: int, dtype: torch.dtype) -> None:
    case = make_case(
        [1, 31, 32, 33, 130], [1] * 5, heads=4, kv_heads=2, head_dim=32, page_size=16, dtype=dtype, device=DEVICE
    )
    out = torch.empty_like(case.q)
    paged_decode_triton(case.q, case.kv, case.page_table, case.seq_lens, case.scale, 4096, out, SMALL, splits)
    assert_close(out, case.expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_decode_agrees_with_the_table_s_tiles(head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(
        [63, 64, 65, 200], [1] * 4, heads=3, kv_heads=1, head_dim=head_dim, page_size=64, dtype=dtype, device=DEVICE
    )
    out = torch.empty_like(case.q)
    paged_decode_triton(case.q, case.kv, case.page_table, case.seq_lens, case.scale, case.max_seq_len, out)
    assert_close(out, case.expected, dtype)
    paged_decode_reference(case.q, case.kv, case.page_table, case.seq_lens, case.scale, case.max_seq_len, out)
    assert_close(out, case.expected, dtype)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8])
def test_prefill_agrees_for_every_group_size(group: int, page_size: int) -> None:
    case = make_case(
        [7, 64, 65, 33], [7, 16, 1, 20], heads=2 * group, kv_heads=2, head_dim=16, page_size=page_size,
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    out = torch.empty_like(case.q)
    args = (case.q, case.kv, case.page_table, case.seq_lens, case.cu_query_lens, case.scale, case.max_query_len)
    paged_prefill_triton(*args, out, SMALL)
    assert_close(out, case.expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_prefill_agrees_with_the_table_s_tiles(head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(
        [63, 64, 150, 129], [63, 64, 70, 1], heads=3, kv_heads=1, head_dim=head_dim, page_size=16, dtype=dtype,
        device=DEVICE,
    )  # fmt: skip
    out = torch.empty_like(case.q)
    args = (case.q, case.kv, case.page_table, case.seq_lens, case.cu_query_lens, case.scale, case.max_query_len)
    paged_prefill_triton(*args, out)
    assert_close(out, case.expected, dtype)
    paged_prefill_reference(*args, out)
    assert_close(out, case.expected, dtype)


def test_a_row_without_new_tokens_changes_nothing() -> None:
    case = make_case(
        [20, 40, 9], [5, 0, 9], heads=2, kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32, device=DEVICE
    )
    out = torch.empty_like(case.q)
    args = (case.q, case.kv, case.page_table, case.seq_lens, case.cu_query_lens, case.scale, case.max_query_len)
    paged_prefill_triton(*args, out, SMALL)
    assert_close(out, case.expected, torch.float32)


def test_nothing_to_do_is_fine() -> None:
    kv = torch.zeros(2, 2, 16, 1, 16, device=DEVICE)
    none, table = torch.zeros(0, 2, 16, device=DEVICE), torch.zeros(0, 1, dtype=torch.int32, device=DEVICE)
    lens, cu = torch.zeros(0, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert paged_decode_triton(none, kv, table, lens, 1.0, 1, none.clone()).shape == (0, 2, 16)
    assert paged_prefill_triton(none, kv, table, lens, cu, 1.0, 0, none.clone()).shape == (0, 2, 16)
    paged_write_triton(kv, none[:, :1], none[:, :1], torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert not kv.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (3, 24), (8, 64)])
def test_write_puts_each_token_at_its_slot(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    fused = torch.randn(13, 3 * kv_heads, head_dim, device=DEVICE).to(dtype)
    k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    slots = torch.randperm(5 * 16, device=DEVICE)[:13]
    written, expected = torch.zeros(2, 5, 2, 16, kv_heads, head_dim, device=DEVICE, dtype=dtype)
    paged_write_triton(written, k, v, slots)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 16, 0, slot % 16] = k[token]
        expected[slot // 16, 1, slot % 16] = v[token]
    assert torch.equal(written, expected)
    reference = torch.zeros_like(expected)
    paged_write_reference(reference, k, v, slots)
    assert torch.equal(reference, expected)


def test_shapes_that_do_not_fit_are_named() -> None:
    kv = torch.zeros(2, 2, 16, 2, 16)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"q \(1, 3, 16\) does not fit kv"):
        paged_decode(torch.zeros(1, 3, 16), kv, table, lens, 1.0, 1)
    with pytest.raises(ValueError, match="cu_query_lens"):
        paged_prefill(torch.zeros(1, 2, 16), kv, table, lens, torch.zeros(3, dtype=torch.int32), 1.0, 1)
    with pytest.raises(ValueError, match="do not fit kv"):
        paged_write(kv, torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), torch.zeros(1, dtype=torch.int64))
