"""latent_unpack: Triton and the reference, and that attention over what it makes is attention over the codes."""

import pytest
import torch

from benthic.kernels.latent_prefill.kernel import latent_prefill_triton
from benthic.kernels.latent_unpack import latent_unpack, latent_unpack_reference
from benthic.kernels.latent_unpack.kernel import latent_unpack_triton
from tests.support.latent_cases import LatentCase, make_latent_case
from tests.support.triton_interpreter import DEVICE


def case_of(length: int, new: int, dtype: torch.dtype = torch.float32, **sizes: int) -> LatentCase:
    given = {"heads": 2, "rank": 32, "rope_dim": 16, "page_size": 4, "topk": 9} | sizes
    return make_latent_case([length], [new], dtype=dtype, device=DEVICE, fp8=True, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rank", "rope_dim", "page_size"), [(32, 16, 4), (24, 12, 1), (256, 8, 16)])
def test_both_give_the_same_numbers(rank: int, rope_dim: int, page_size: int, dtype: torch.dtype) -> None:
    case = case_of(39, 1, dtype, rank=rank, rope_dim=rope_dim, page_size=page_size)
    for num_keys in (1, 15, 16, 17, 39):  # whole blocks and parts, within a page and at its end
        made = []
        for function in (latent_unpack_triton, latent_unpack_reference):
            out = torch.full((-(-num_keys // page_size), page_size, rank + rope_dim), 7.0, dtype=dtype, device=DEVICE)
            assert function(case.latents, case.page_table[0], num_keys, out, rank=rank) is out
            assert (out.view(-1, rank + rope_dim)[num_keys:] == 7).all()
            made.append(out)
        cuts = dtype == torch.bfloat16 and DEVICE.type == "cpu"  # the interpreter cuts bits off
        torch.testing.assert_close(*made, rtol=2**-7 if cuts else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_over_the_numbers_is_attention_over_the_codes(dtype: torch.dtype) -> None:
    case = case_of(37, 5, dtype)
    made = torch.empty((10, 4, 48), dtype=dtype, device=DEVICE)
    latent_unpack_triton(case.latents, case.page_table[0], 37, made, rank=32)
    pages = torch.arange(len(made), dtype=torch.int32, device=DEVICE)
    for selected in (case.selected, None):
        results = []
        for latents, row in ((case.latents, case.page_table[0]), (made, pages)):
            out = torch.empty_like(case.q_latent)
            args = (case.q_latent, case.q_rope, latents, row, 32, selected, case.scale, out)
            results.append(latent_prefill_triton(*args, rank=32))
        exact = DEVICE.type == "cpu"  # a compiler may sum in another order
        torch.testing.assert_close(*results, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-3)


def test_what_does_not_fit_is_named() -> None:
    case = case_of(8, 1)
    row = case.page_table[0]
    with pytest.raises(ValueError, match=r"of torch.float32 are not fp8 records of rank 32"):
        latent_unpack(case.latents.float(), row, 8, torch.float32, rank=32)
    with pytest.raises(ValueError, match="are not fp8 records of rank 128"):
        latent_unpack(case.latents, row, 8, torch.float32, rank=128)
    with pytest.raises(ValueError, match="9 keys are not 1 to 2 pages of 4"):
        latent_unpack(case.latents, row[:2], 9, torch.float32, rank=32)
