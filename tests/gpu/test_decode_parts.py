"""Decode rows of several ranks, compiled, at real sizes: the kernels of parts, and the sharded backends over them."""

import dataclasses

import pytest
import torch

from benthic.attention.choice import Pair, make_pair
from benthic.attention.interface import AttentionSpec
from benthic.attention.latent import LatentBackend
from benthic.attention.latent_triton import TritonLatentBackend
from benthic.attention.sharded_latent import ShardedLatentBackend
from benthic.attention.triton_backend import TritonBackend
from benthic.kernels.index_scores import index_scores_decode
from benthic.kernels.latent_decode import latent_decode_part
from benthic.kernels.latent_decode.reference import latent_decode_part_reference
from benthic.kernels.paged_decode import paged_decode_part
from benthic.kernels.paged_decode.reference import paged_decode_part_reference
from tests.attention.rank_steps import deal, make_batch, num_pages, own_part, rank_forward
from tests.gpu import synchronizing
from tests.support.attention_cases import TOLERANCE, assert_close, make_case
from tests.support.decode_parts import assert_same_part, merged, own_pages, own_selected
from tests.support.index_cases import make_index_case
from tests.support.latent_cases import make_latent_case
from tests.support.latent_steps import Drawn, latent_spec, select, step_case, write
from tests.support.thread_ranks import ThreadCollectives, run_ranks

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LENS = [1, 63, 64, 65, 129, 1000, 3001]  # the first ones have all their pages on one rank
SIZES = {"rank": 512, "rope_dim": 64, "page_size": 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("repeats", "bound"), [(1, 131072), (1, 3001), (40, 3001)])  # many splits, fewer, one
def test_paged_parts(repeats: int, bound: int, dtype: torch.dtype, cuda: torch.device) -> None:
    rows = LENS * repeats
    case = make_case(
        rows, [1] * len(rows), heads=32, kv_heads=8, head_dim=128, page_size=64, dtype=dtype, device=cuda
    )  # fmt: skip
    parts = []
    for rank in range(4):
        table, lens = own_pages(case.page_table, case.seq_lens, 64, rank, 4)
        with synchronizing.forbidden():
            parts.append(paged_decode_part(case.q, case.kv, table, lens, case.scale, bound))
        expected = paged_decode_part_reference(case.q, case.kv, table, lens, case.scale)
        assert_same_part(parts[-1], expected, TOLERANCE[dtype], lens == 0)
    assert_close(merged(parts), case.expected, dtype)


@pytest.mark.parametrize(("repeats", "heads", "fp8"), [(1, 32, False), (24, 32, False), (1, 128, False), (1, 32, True)])
@pytest.mark.parametrize("topk", [5, 2048])
def test_latent_parts(topk: int, repeats: int, heads: int, fp8: bool, cuda: torch.device) -> None:
    """Selections of 5 positions leave ranks without any; on Hopper they have a kernel of their own."""
    rows = LENS * repeats
    case = make_latent_case(rows, [1] * len(rows), heads=heads, topk=topk, dtype=BF16, device=cuda, fp8=fp8, **SIZES)
    for selected, judge in ((None, case.dense), (case.selected, case.expected)):
        parts = []
        for rank in range(4):
            table, lens = own_pages(case.page_table, case.seq_lens, 64, rank, 4)
            with synchronizing.forbidden():
                own = None if selected is None else own_selected(selected, 64, rank, 4)
                args = (case.q_latent, case.q_rope, case.latents, table, lens, own)
                parts.append(latent_decode_part(*args, 131072, case.scale, rank=512))
            expected = latent_decode_part_reference(*args, case.scale, rank=512)
            assert_same_part(parts[-1], expected, TOLERANCE[BF16], lens == 0 if own is None else own[:, 0] < 0)
        assert_close(merged(parts), judge, BF16)


@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float32, False), (BF16, False), (BF16, True)])
def test_a_key_s_score_is_the_same_on_its_own_rank(dtype: torch.dtype, fp8: bool, cuda: torch.device) -> None:
    """Bit by bit, or the ranks' best would not be the best of all."""
    case = make_index_case(3, 3000, heads=32, head_dim=128, page_size=64, dtype=dtype, device=cuda, fp8=fp8)
    lens = torch.tensor([3000, 1999, 64], dtype=torch.int32, device=cuda)
    whole = torch.full((3, 3000), float("nan"), device=cuda)
    index_scores_decode(case.queries, case.weights, case.keys, case.page_table, lens, 3000, whole)
    for rank in range(4):
        table, own = own_pages(case.page_table, lens, 64, rank, 4)
        scores = torch.full((3, 1024), float("nan"), device=cuda)
        index_scores_decode(case.queries, case.weights, case.keys, table, own, 768, scores)
        for row, length in enumerate(own.tolist()):
            places = torch.arange(length, device=cuda)
            assert torch.equal(scores[row, :length], whole[row, (places // 64 * 4 + rank) * 64 + places % 64])


def test_grouped_queries_of_two_ranks(cuda: torch.device) -> None:
    seq_lens, query_lens = [40, 1000, 129, 300], [1, 1, 1, 200]
    case = make_case(
        seq_lens, query_lens, heads=8, kv_heads=2, head_dim=128, page_size=64, dtype=BF16, device=cuda
    )  # fmt: skip
    firsts = [n - q for n, q in zip(seq_lens, query_lens, strict=True)]
    batch = make_batch(case.page_table.cpu(), firsts, seq_lens, 3, 64)
    batch = dataclasses.replace(batch, positions=batch.positions.to(cuda))
    lanes = deal(case.page_table.cpu(), num_pages(seq_lens, 64), 64, 2)
    spec = AttentionSpec(
        num_layers=1, num_heads=8, num_kv_heads=2, head_dim=128, scale=case.scale, page_size=64, dtype=BF16,
        device=cuda, max_seq_len=4096,
    )  # fmt: skip
    pools = [lanes.pool(rank, case.kv[None], torch.zeros_like(case.kv[None, 0])) for rank in range(2)]

    def body(group: ThreadCollectives) -> tuple[torch.Tensor, torch.Tensor]:
        backend = make_pair(Pair(TritonBackend, TritonBackend), spec, {"target_kv": pools[group.rank]}, group)
        part, own = rank_forward(batch, lanes, group)
        rows = (own_part(x, part, len(own.input_ids)) for x in (case.q, case.k, case.v))
        out = backend.attend(0, *rows, own, backend.begin(own))  # type: ignore[attr-defined]
        return out[: own.num_tokens], torch.from_numpy(part.own_rows).to(cuda)

    results = run_ranks(2, body)
    for out, rows in results:
        assert_close(out, case.expected[rows], BF16)
        assert torch.equal(out[:3], results[0][0][:3])


@pytest.mark.parametrize(("fp8", "index_fp8"), [(False, False), (True, True)])
def test_latents_of_two_ranks(fp8: bool, index_fp8: bool, cuda: torch.device) -> None:
    """Decode rows on both sides of K: what one rank selects and computes, with the same kernels."""
    sizes = {"heads": 32, "index_heads": 32, "index_dim": 128, "topk": 256, **SIZES}
    spec = latent_spec(cuda, dtype=BF16, fp8=fp8, index_fp8=index_fp8, max_seq_len=4096, **sizes)  # type: ignore[arg-type]
    lens = [40, 256, 257, 3000]
    case = step_case(spec, lens, [1] * 4, 4)
    alone = case.new_backend(TritonLatentBackend)
    assert alone.index_keys is not None
    write(alone, case.step)
    lanes = deal(case.step.batch.page_table.cpu(), num_pages(lens, 64), 64, 2)
    pools = [
        {
            name: lanes.pool(rank, pool, torch.zeros_like(pool[:, 0]))
            for name, pool in (("target_kv", alone.latents), ("index_k", alone.index_keys))
        }
        for rank in range(2)
    ]
    expected, wanted = decode(alone, case.step, None)

    def body(group: ThreadCollectives) -> tuple[torch.Tensor, torch.Tensor]:
        pair = Pair(TritonLatentBackend, TritonLatentBackend)
        backend = make_pair(pair, spec, pools[group.rank], group)
        assert isinstance(backend, ShardedLatentBackend)
        _, own = rank_forward(case.step.batch, lanes, group)
        return decode(backend, dataclasses.replace(case.step, batch=own), expected)

    for selected, out in run_ranks(2, body):
        assert [set(row) for row in selected.tolist()] == [set(row) for row in expected.tolist()]
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


def decode(backend: LatentBackend, drawn: Drawn, selected: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's selection, and attention of the second layer over it, or over `selected`."""
    found = select(backend, drawn)
    assert found is not None
    batch = drawn.batch
    chosen = found if selected is None else selected
    return found, backend.attend(1, drawn.q_latent, drawn.q_rope, chosen, batch, backend.begin(batch))
