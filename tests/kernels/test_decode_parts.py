"""paged_decode_part and latent_decode_part: Triton beside the reference, and the merge of the parts against float64."""

from typing import Any

import pytest
import torch

from benthic.kernels import latent_decode, paged_decode
from benthic.kernels.latent_decode.kernel import latent_decode_triton
from benthic.kernels.latent_tiles import LatentTiles
from benthic.kernels.paged_decode.kernel import paged_decode_triton
from benthic.kernels.split_merge.kernel import merge_splits
from benthic.kernels.tiles import Tiles
from tests.support.attention_cases import TOLERANCE, assert_close, make_case
from tests.support.decode_parts import Part, assert_same_part, merged, own_pages, own_selected
from tests.support.latent_cases import LatentCase, make_latent_case
from tests.support.triton_interpreter import DEVICE

DTYPES = (torch.float32, torch.bfloat16)
LENS = [1, 15, 33, 70]  # of one page, or of two, on the first ranks alone
PLAIN, TURNED = LatentTiles(16, 16, 4, 2), LatentTiles(16, 16, 4, 2, turned=True)


def new_part(q: torch.Tensor) -> Part:
    """Where a kernel puts its part; NaN shows what it leaves out."""
    out = torch.full(q.shape, float("nan"), dtype=torch.float32, device=DEVICE)
    return out, out[..., 0].contiguous()


@pytest.mark.parametrize(("splits", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (8, torch.float32)])
def test_paged_parts(splits: int, dtype: torch.dtype) -> None:
    case = make_case(
        LENS, [1] * 4, heads=3, kv_heads=1, head_dim=16, page_size=16, dtype=dtype, device=DEVICE
    )  # fmt: skip
    parts = []
    for rank in range(3):
        table, lens = own_pages(case.page_table, case.seq_lens, 16, rank, 3)
        part = new_part(case.q)
        paged_decode_triton(
            case.q, case.kv, table, lens, case.scale, 4096, part[0], Tiles(16, 16, 4, 2), splits, out_lse=part[1]
        )
        expected = paged_decode.paged_decode_part_reference(case.q, case.kv, table, lens, case.scale)
        assert_same_part(part, expected, TOLERANCE[dtype], lens == 0)
        parts.append(part)
    assert_close(merged(parts), case.expected, dtype)


def test_paged_parts_with_the_table_s_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(
        LENS, [1] * 4, heads=3, kv_heads=1, head_dim=64, page_size=64, dtype=torch.float32, device=DEVICE
    )  # fmt: skip
    for interpreted in (False, True):
        monkeypatch.setattr(paged_decode, "use_triton", lambda q, chosen=interpreted: chosen)
        parts = []
        for rank in range(2):
            table, lens = own_pages(case.page_table, case.seq_lens, 64, rank, 2)
            parts.append(paged_decode.paged_decode_part(case.q, case.kv, table, lens, case.scale, 256))
        assert (parts[1][1][:3] == float("-inf")).all()
        assert_close(merged(parts), case.expected, torch.float32)


def latent_case(dtype: torch.dtype = torch.float32, **sizes: Any) -> LatentCase:
    given = {"heads": 5, "rank": 32, "rope_dim": 16, "page_size": 8, "topk": 21} | sizes
    return make_latent_case(LENS, [1] * 4, dtype=dtype, device=DEVICE, **given)


def latent_parts(case: LatentCase, dtype: torch.dtype, tiles: LatentTiles | None, splits: int | None) -> None:
    """Dense and sparse, on three ranks, of which some rows have no token or no selected one."""
    page_size, empties = case.latents.shape[1], set()
    for selected, judge in ((None, case.dense), (case.selected, case.expected)):
        parts = []
        for rank in range(3):
            table, lens = own_pages(case.page_table, case.seq_lens, page_size, rank, 3)
            own = None if selected is None else own_selected(selected, page_size, rank, 3)
            args = (case.q_latent, case.q_rope, case.latents, table, lens, own)
            part = new_part(case.q_latent)
            latent_decode_triton(
                *args, 4096, case.scale, part[0], rank=case.rank, tiles=tiles, splits=splits, out_lse=part[1]
            )
            expected = latent_decode.latent_decode_part_reference(*args, case.scale, rank=case.rank)
            empty = lens == 0 if own is None else own[:, 0] < 0
            assert_same_part(part, expected, TOLERANCE[dtype], empty)
            empties |= {(bool(none), length > 0) for none, length in zip(empty, lens.tolist(), strict=True)}
            parts.append(part)
        assert_close(merged(parts), judge, dtype)
    assert empties == {(True, False), (True, True), (False, True)}


@pytest.mark.parametrize(("splits", "tiles"), [(1, PLAIN), (1, TURNED), (2, TURNED), (8, PLAIN)])
def test_latent_parts(splits: int, tiles: LatentTiles) -> None:
    latent_parts(latent_case(topk=2), torch.float32, tiles, splits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_latent_parts_of_both_pools(fp8: bool, dtype: torch.dtype) -> None:
    latent_parts(latent_case(dtype, rank=16, rope_dim=8, topk=2, fp8=fp8), dtype, None, None)


def test_latent_parts_are_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = latent_case()
    args = (case.q_latent, case.q_rope, case.latents, case.page_table, case.seq_lens, case.selected, 4096, case.scale)
    found = []
    for interpreted in (False, True):
        monkeypatch.setattr(latent_decode, "use_triton", lambda q, chosen=interpreted: chosen)
        found.append(latent_decode.latent_decode_part(*args, rank=32))
        assert_close(found[-1][0], case.expected, torch.float32)
    assert_same_part(found[1], found[0], 2e-5, torch.zeros(4, dtype=torch.bool, device=DEVICE))


def test_no_row_is_no_work() -> None:
    case = latent_case()
    rows = (case.q_latent[:0], case.q_rope[:0], case.latents, case.page_table[:0], case.seq_lens[:0])
    out, lse = latent_decode.latent_decode_part(*rows, None, 64, 1.0, rank=32)
    assert out.shape == (0, 5, 32)
    assert lse.shape == (0, 5)


def test_shapes_that_do_not_fit_are_named() -> None:
    case = latent_case()
    with pytest.raises(ValueError, match="do not have the 4 rows"):
        latent_decode.latent_decode_part(
            case.q_latent, case.q_rope, case.latents, case.page_table, case.seq_lens[:1], None, 8, 1.0, rank=32
        )
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="does not fit kv"):
        paged_decode.paged_decode_part(torch.zeros(1, 3, 16), torch.zeros(2, 2, 16, 2, 16), table, lens, 1.0, 1)


@pytest.mark.parametrize("size", [24, 130])
@pytest.mark.parametrize("splits", [1, 4])
def test_splits_without_a_key_are_not_read(splits: int, size: int) -> None:
    rng = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 2, splits, size, generator=rng).to(DEVICE)
    lse = 3 * torch.randn(3, 2, splits, generator=rng).to(DEVICE)
    lse[0] = float("-inf")
    lse[1, :, 1:] = float("-inf")
    lse[2] += 1e4  # far past what exp2 can hold
    wanted = lse.double() * torch.tensor(2.0, device=DEVICE).log().item()
    weights = (wanted - wanted.logsumexp(-1, keepdim=True)).exp().nan_to_num(0)
    expected = (parts.double() * weights.unsqueeze(-1)).sum(2)
    parts[lse == float("-inf")] = float("nan")
    out, total = new_part(parts[:, :, 0])
    merge_splits(parts, lse, out, total)
    assert not out[0].any()
    assert_close(out, expected, torch.float32)
    assert_close(total, wanted.logsumexp(-1), torch.float32)
