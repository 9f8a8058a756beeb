"""The latent kernels, compiled, at real sizes, against float64."""

import pytest
import torch

from benthic.kernels.latent_decode import latent_decode
from benthic.kernels.latent_prefill import latent_prefill
from benthic.kernels.latent_records import read_latents
from benthic.kernels.latent_unpack import latent_unpack, latent_unpack_reference
from tests.support.attention_cases import assert_close
from tests.support.latent_cases import make_latent_case

pytestmark = pytest.mark.gpu
SIZES = {"rank": 512, "rope_dim": 64, "page_size": 64}  # few sizes: each is compiled, which takes most of the time
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("heads", "dtype"), [(5, BF16), (16, BF16), (32, BF16), (32, FP16), (40, BF16), (64, BF16), (128, BF16)]
)
def test_sparse_prefill(heads: int, dtype: torch.dtype, cuda: torch.device) -> None:
    """A late chunk, and one from the first token on: more rows than multiprocessors, short ones, -1 behind."""
    for length, new in ((3000, 70), (200, 200)):
        case = make_latent_case([length], [new], heads=heads, topk=2048, dtype=dtype, device=cuda, **SIZES)
        args = (case.q_latent, case.q_rope, case.latents, case.page_table[0], length - new)
        out = torch.full_like(case.expected, float("nan"), dtype=dtype)
        assert_close(latent_prefill(*args, case.selected, case.scale, out, rank=512), case.expected, dtype)


@pytest.mark.parametrize("topk", [63, 65, 129])
def test_sparse_prefill_of_few_keys(topk: int, cuda: torch.device) -> None:
    case = make_latent_case([300], [280], heads=32, topk=topk, dtype=BF16, device=cuda, **SIZES)
    args = (case.q_latent, case.q_rope, case.latents, case.page_table[0], 20)
    assert_close(latent_prefill(*args, case.selected, case.scale, rank=512), case.expected, BF16)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_unpacked_codes_are_the_reference_s_numbers(dtype: torch.dtype, cuda: torch.device) -> None:
    """And attention over them is attention over the codes, but for the order of its sums."""
    case = make_latent_case([700], [70], heads=32, topk=256, dtype=dtype, device=cuda, fp8=True, **SIZES)
    for num_keys in (1, 64, 65, 700):
        made = latent_unpack(case.latents, case.page_table[0], num_keys, dtype, rank=512)
        wanted = latent_unpack_reference(case.latents, case.page_table[0], num_keys, torch.empty_like(made), rank=512)
        assert torch.equal(made.view(-1, 576)[:num_keys], wanted.view(-1, 576)[:num_keys])
    pages = torch.arange(len(made), dtype=torch.int32, device=cuda)
    args = (case.q_latent, case.q_rope, made, pages, 630)
    assert_close(latent_prefill(*args, case.selected, case.scale, rank=512), case.expected, dtype)
    assert_close(latent_prefill(*args, None, case.scale, rank=512), case.dense, dtype)


@pytest.mark.parametrize(("heads", "fp8"), [(16, False), (128, False), (32, True)])
def test_dense_prefill(heads: int, fp8: bool, cuda: torch.device) -> None:
    case = make_latent_case([700], [70], heads=heads, topk=256, dtype=BF16, device=cuda, fp8=fp8, **SIZES)
    args = (case.q_latent, case.q_rope, case.latents, case.page_table[0], 630)
    assert_close(latent_prefill(*args, None, case.scale, rank=512), case.dense, BF16)
    if heads < 128:  # of fp8 pools by plain Triton
        assert_close(latent_prefill(*args, case.selected, case.scale, rank=512), case.expected, BF16)


@pytest.mark.parametrize(
    ("dtype", "heads", "rank", "rope_dim", "fp8"),
    [(torch.float32, 4, 32, 16, False), (BF16, 5, 64, 32, True), (BF16, 40, 128, 32, False)],
)
def test_small_models(dtype: torch.dtype, heads: int, rank: int, rope_dim: int, fp8: bool, cuda: torch.device) -> None:
    given = {"heads": heads, "rank": rank, "rope_dim": rope_dim, "page_size": 16, "topk": 100, "fp8": fp8}
    case = make_latent_case([300], [30], dtype=dtype, device=cuda, **given)  # type: ignore[arg-type]
    args = (case.q_latent, case.q_rope, case.latents, case.page_table[0], 270)
    assert_close(latent_prefill(*args, case.selected, case.scale, rank=rank), case.expected, dtype)
    assert_close(latent_prefill(*args, None, case.scale, rank=rank), case.dense, dtype)
    case = make_latent_case([300, 1, 77], [1, 1, 1], dtype=dtype, device=cuda, **given)  # type: ignore[arg-type]
    rows = (case.q_latent, case.q_rope, case.latents, case.page_table, case.seq_lens)
    assert_close(latent_decode(*rows, case.selected, 4096, case.scale, rank=rank), case.expected, dtype)
    assert_close(latent_decode(*rows, None, 4096, case.scale, rank=rank), case.dense, dtype)


@pytest.mark.parametrize(
    ("batch", "heads", "fp8"),
    [
        (1, 32, False),
        (40, 32, False),
        (140, 32, False),
        (3, 40, False),
        (3, 128, False),
        (3, 16, True),
        (3, 32, True),
        (40, 32, True),
        (140, 32, True),
        (3, 128, True),
    ],
)
def test_sparse_decode(batch: int, heads: int, fp8: bool, cuda: torch.device) -> None:
    """One part a row, two and many; short rows leave parts empty."""
    lens = [2500, *(1 + 97 * row % 2400 for row in range(batch - 1))]
    case = make_latent_case(lens, [1] * batch, heads=heads, topk=2048, dtype=BF16, device=cuda, fp8=fp8, **SIZES)
    rows = (case.q_latent, case.q_rope, case.latents, case.page_table, case.seq_lens)
    out = torch.full_like(case.expected, float("nan"), dtype=BF16)
    for bound in (4000, 131072):  # the bound only shapes the launch
        assert_close(latent_decode(*rows, case.selected, bound, case.scale, out, rank=512), case.expected, BF16)


@pytest.mark.parametrize(("heads", "fp8"), [(16, False), (32, True), (128, False)])
def test_dense_decode(heads: int, fp8: bool, cuda: torch.device) -> None:
    case = make_latent_case([2500, 1, 98], [1, 1, 1], heads=heads, topk=64, dtype=BF16, device=cuda, fp8=fp8, **SIZES)
    rows = (case.q_latent, case.q_rope, case.latents, case.page_table, case.seq_lens)
    assert_close(latent_decode(*rows, None, 131072, case.scale, rank=512), case.dense, BF16)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_captured_decode_follows_lengths_and_selections(sparse: bool, cuda: torch.device) -> None:
    sizes = {"heads": 32, "topk": 256, "dtype": BF16, "device": cuda, **SIZES}
    one, two = (make_latent_case(lens, [1, 1], seed=lens[0], **sizes) for lens in ([100, 700], [699, 1]))  # type: ignore[arg-type]
    fields = ("q_latent", "q_rope", "latents", "page_table", "seq_lens", "selected")
    table = torch.zeros(2, 16, dtype=torch.int32, device=cuda)
    held = [getattr(one, name).clone() for name in fields]
    held[2], held[3] = torch.zeros(40, 64, 576, dtype=torch.bfloat16, device=cuda), table
    out = torch.empty_like(held[0])

    def call() -> None:
        latent_decode(*held[:5], held[5] if sparse else None, 1024, one.scale, out, rank=512)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for case in (one, two):
        for buffer, name in zip(held, fields, strict=True):
            source = getattr(case, name)
            buffer[tuple(slice(0, size) for size in source.shape)].copy_(source)
        graph.replay()
        assert_close(out, case.expected if sparse else case.dense, torch.bfloat16)


def test_offsets_past_two_to_the_31_elements(cuda: torch.device) -> None:
    """The last pages of a 9 GB pool: an offset in 32 bits would wrap."""
    pages = 70_000
    assert pages * 64 * 576 > 2**31
    if torch.cuda.mem_get_info(cuda)[0] < 12e9:
        pytest.skip("needs 12 GB of free device memory")
    pool = torch.zeros(pages, 64, 576, dtype=torch.bfloat16, device=cuda)
    pool[[pages - 1, pages - 7]] = torch.randn(2, 64, 576, device=cuda).to(torch.bfloat16)
    table = torch.tensor([[pages - 1, pages - 7]], dtype=torch.int32, device=cuda)
    query = torch.randn(1, 32, 576, device=cuda).to(torch.bfloat16)
    positions = torch.randperm(128, device=cuda)[None, :].to(torch.int32)
    where = positions[0].long()
    entries = read_latents(pool, table[0][where // 64], where % 64, 512).double()
    expected = (query[0].double() @ entries.T * 0.05).softmax(-1) @ entries[:, :512]
    lens = torch.tensor([128], dtype=torch.int32, device=cuda)
    parts = (query[..., :512], query[..., 512:], pool)
    for selected in (positions, None):  # the one has kernels of its own on Hopper
        out = latent_prefill(*parts, table[0], 127, selected, 0.05, rank=512)
        assert_close(out, expected[None], torch.bfloat16)
    out = latent_decode(*parts, table, lens, positions, 128, 0.05, rank=512)
    assert_close(out, expected[None], torch.bfloat16)
