"""The Triton kernels, compiled, at real sizes, against float64."""

import math

import pytest
import torch

from benthic.kernels.greedy_pick import greedy_pick
from benthic.kernels.paged_decode import paged_decode
from benthic.kernels.paged_prefill import paged_prefill
from benthic.kernels.paged_write import paged_write
from benthic.kernels.rms_norm import rms_norm, rms_norm_reference
from benthic.kernels.rope import rope, rope_reference
from tests.support.attention_cases import assert_close, make_case

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
def test_decode(page_size: int, head_dim: int, dtype: torch.dtype, cuda: torch.device) -> None:
    lens = [1, 63, 64, 65, 127, 128, 129, 1000, 3001]
    case = make_case(
        lens, [1] * len(lens), heads=8, kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype, device=cuda
    )
    for bound in (3001, 131072):  # the bound only shapes the launch
        out = paged_decode(case.q, case.kv, case.page_table, case.seq_lens, case.scale, bound)
        assert_close(out, case.expected, dtype)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_decode_and_prefill_of_every_group_size(group: int, cuda: torch.device) -> None:
    for query_lens in ([1, 1, 1], [70, 1, 129]):
        case = make_case(
            [70, 200, 129], query_lens, heads=2 * group, kv_heads=2, head_dim=64, page_size=64,
            dtype=torch.bfloat16, device=cuda,
        )  # fmt: skip
        if query_lens == [1, 1, 1]:
            out = paged_decode(case.q, case.kv, case.page_table, case.seq_lens, case.scale, case.max_seq_len)
            assert_close(out, case.expected, torch.bfloat16)
        args = (case.page_table, case.seq_lens, case.cu_query_lens, case.scale, case.max_query_len)
        assert_close(paged_prefill(case.q, case.kv, *args), case.expected, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
def test_prefill(page_size: int, head_dim: int, dtype: torch.dtype, cuda: torch.device) -> None:
    case = make_case(
        [1, 64, 65, 700, 1500], [1, 64, 3, 700, 500], heads=6, kv_heads=2, head_dim=head_dim, page_size=page_size,
        dtype=dtype, device=cuda,
    )  # fmt: skip
    args = (case.page_table, case.seq_lens, case.cu_query_lens, case.scale, case.max_query_len)
    assert_close(paged_prefill(case.q, case.kv, *args), case.expected, dtype)


def test_offsets_past_two_to_the_31_elements(cuda: torch.device) -> None:
    """The last pages of a 10 GB pool: an offset in 32 bits would wrap."""
    pages, page_size, heads, head_dim = 40_000, 64, 8, 128
    assert pages * 2 * page_size * heads * head_dim > 2**31
    if torch.cuda.mem_get_info(cuda)[0] < 14e9:
        pytest.skip("needs 14 GB of free device memory")
    kv = torch.zeros(pages, 2, page_size, heads, head_dim, dtype=torch.bfloat16, device=cuda)
    k, v = torch.randn(2, 100, heads, head_dim, device=cuda).to(torch.bfloat16)
    table = torch.tensor([[pages - 1, pages - 7]], dtype=torch.int32, device=cuda)
    slots = torch.cat([torch.arange(64) + (pages - 1) * 64, torch.arange(36) + (pages - 7) * 64]).to(cuda)
    paged_write(kv, k, v, slots)
    assert torch.equal(kv[pages - 7, 1, :36], v[64:])
    assert torch.equal(kv[pages - 1, 0], k[:64])
    q = torch.randn(100, 16, head_dim, device=cuda).to(torch.bfloat16)
    lens = torch.tensor([100], dtype=torch.int32, device=cuda)
    cu = torch.tensor([0, 100], dtype=torch.int32, device=cuda)
    scale = head_dim**-0.5
    wide = [x.double().repeat_interleave(2, 1).transpose(0, 1) for x in (k, v)]
    seen = torch.ones(100, 100, dtype=torch.bool, device=cuda).tril()
    scores = (q.double().transpose(0, 1) @ wide[0].transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    expected = (scores.softmax(-1) @ wide[1]).transpose(0, 1)
    assert_close(paged_prefill(q, kv, table, lens, cu, scale, 100), expected, torch.bfloat16)
    assert_close(paged_decode(q[99:], kv, table, lens, scale, 100), expected[99:], torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 576, 4096, 7168])
def test_rms_norm(size: int, dtype: torch.dtype, cuda: torch.device) -> None:
    x, residual = torch.randn(2, 33, size, device=cuda).to(dtype)
    weight = torch.randn(size, device=cuda).to(dtype)
    other = residual.clone()
    expected = rms_norm_reference(x, weight, 1e-5, other)
    assert_close(rms_norm(x, weight, 1e-5, residual), expected.double(), dtype)
    assert torch.equal(residual, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(dtype: torch.dtype, cuda: torch.device) -> None:
    fused = torch.randn(257, 40, 128, device=cuda).to(dtype)
    other = fused.clone()
    angles = torch.arange(4096)[:, None] * 1e4 ** (-torch.arange(64) / 64)
    table = torch.cat([angles.cos(), angles.sin()], -1).to(cuda)
    positions = torch.randint(0, 4096, (257,), device=cuda)
    rope(fused[:, :24], fused[:, 24:32], table, positions)
    rope_reference(other[:, :24], other[:, 24:32], table, positions)
    assert_close(fused, other.double(), dtype)


@pytest.mark.parametrize("vocabulary", [1, 5000, 65_536, 151_937])
@pytest.mark.parametrize("rows", [1, 16, 257])
def test_greedy_pick(rows: int, vocabulary: int, cuda: torch.device) -> None:
    logits = torch.randint(-3, 4, (rows, vocabulary), device=cuda).float()  # ties everywhere
    slots = torch.randperm(rows + 9, device=cuda)[:rows]
    tokens, last = (
        torch.zeros(rows, dtype=torch.int64, device=cuda),
        torch.zeros(rows + 9, dtype=torch.int64, device=cuda),
    )
    greedy_pick(logits, slots, tokens, last)
    expected = (logits == logits.max(1, keepdim=True).values).int().argmax(1)
    assert torch.equal(tokens, expected)
    assert torch.equal(last[slots], expected)
