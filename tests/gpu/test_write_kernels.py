"""Writes of latents and index keys and the turning of queries, compiled, at real sizes, against the references."""

import pytest
import torch

from benthic.kernels.index_query import index_query, index_query_reference
from benthic.kernels.index_write import index_write, index_write_reference
from benthic.kernels.latent_step import IndexStep, latent_step, latent_step_reference
from benthic.kernels.latent_write import latent_write, latent_write_reference
from benthic.kernels.query_rope import query_rope, query_rope_reference
from benthic.kernels.query_step import query_step, query_step_reference
from tests.support.attention_cases import assert_close
from tests.support.latent_pools import read_index_keys, read_latents, rope_table

pytestmark = pytest.mark.gpu
PAGE, PAGES = 64, 9
QUERY, RANK, ROPE, INDEX = 1536, 512, 64, 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def pools(dtype: torch.dtype, fp8: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if fp8:
        latents = torch.zeros(PAGES, PAGE, RANK + 4 * (RANK // 128) + 2 * ROPE, dtype=torch.uint8, device=device)
        return latents, torch.zeros(PAGES, PAGE * (INDEX + 4), dtype=torch.uint8, device=device)
    return (
        torch.zeros(PAGES, PAGE, RANK + ROPE, dtype=dtype, device=device),
        torch.zeros(PAGES, PAGE, INDEX, dtype=dtype, device=device),
    )


def assert_same_codes(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, fp8: bool) -> None:
    """Alike; in fp8 but for the few values that the last bit of a float32 sum pushes over a code's edge."""
    if not fp8:
        assert_close(actual, expected, dtype)
        return
    near = (actual - expected).abs() <= 1e-4 * expected.abs().amax()
    assert near.double().mean() > 0.99
    assert ((actual - expected).abs() <= expected.abs() / 7 + 1e-3 * expected.abs().amax()).all()


def assert_same_latents(
    actual: torch.Tensor, slots: torch.Tensor, expected: torch.Tensor, expected_slots: torch.Tensor, dtype: torch.dtype
) -> None:
    fp8 = actual.dtype == torch.uint8
    latent, rope = read_latents(actual, slots, RANK)
    expected_latent, expected_rope = read_latents(expected, expected_slots, RANK)
    assert_same_codes(latent, expected_latent, dtype, fp8)
    assert_close(rope, expected_rope, torch.bfloat16 if fp8 else dtype)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 64, 500])
@pytest.mark.parametrize("fused", [False, True])
def test_writes(fused: bool, tokens: int, dtype: torch.dtype, fp8: bool, cuda: torch.device) -> None:
    width = QUERY + RANK + ROPE
    product = torch.randn(tokens, width + INDEX, device=cuda).to(dtype)
    q_weight, weight = torch.randn(QUERY, device=cuda).to(dtype), torch.randn(RANK, device=cuda).to(dtype)
    key_weight, bias = torch.randn(2, INDEX, device=cuda)
    slots = torch.randperm(PAGES * PAGE)[:tokens].to(cuda)
    where = (rope_table(ROPE, 4096, cuda), torch.randint(0, 4096, (tokens,), device=cuda), slots)
    latents, keys = pools(dtype, fp8, cuda)
    expected_latents, expected_keys = pools(dtype, fp8, cuda)
    norm = {"weight": key_weight, "bias": bias, "page_size": PAGE, "interleaved": True}
    expected_index = IndexStep(keys=expected_keys, **norm)
    expected = latent_step_reference(
        product, q_weight, weight, 1e-6, *where, expected_latents, rank=RANK, index=expected_index
    )
    if fused:
        index = IndexStep(keys=keys, **norm)
        out = latent_step(product, q_weight, weight, 1e-6, *where, latents, rank=RANK, index=index)
        assert_close(out, expected.double(), dtype)
    else:
        latent_write(product[:, QUERY:width], weight, 1e-6, *where, latents, rank=RANK)
        index_write(product[:, width:], key_weight, bias, *where, keys, page_size=PAGE, interleaved=True)
    assert_same_latents(latents, slots, expected_latents, slots, dtype)
    key, wanted = read_index_keys(keys, slots, PAGE), read_index_keys(expected_keys, slots, PAGE)
    assert_same_codes(key, wanted, dtype, fp8)


def test_offsets_past_two_to_the_31_bytes(cuda: torch.device) -> None:
    """The last pages of pools over 2 GiB: an offset in 32 bits would wrap."""
    pages = 60_000
    latents = torch.zeros(pages, PAGE, 656, dtype=torch.uint8, device=cuda)
    keys = torch.zeros(4 * pages, PAGE * (INDEX + 4), dtype=torch.uint8, device=cuda)
    assert latents.numel() > 2**31
    projected, ones = torch.randn(100, RANK + ROPE, device=cuda).bfloat16(), torch.ones(RANK, device=cuda).bfloat16()
    slots = torch.arange(100, device=cuda) + pages * PAGE - 100
    where = (rope_table(ROPE, 64, cuda), torch.arange(100, device=cuda) % 64)
    latent_write(projected, ones, 1e-6, *where, slots, latents, rank=RANK)
    small = torch.zeros(2, PAGE, 656, dtype=torch.uint8, device=cuda)
    latent_write_reference(projected, ones, 1e-6, *where, slots - (pages - 2) * PAGE, small, rank=RANK)
    first = slots - (pages - 2) * PAGE
    assert_same_latents(latents[-2:], first, small, first, torch.bfloat16)
    last = torch.arange(100, device=cuda) + 4 * pages * PAGE - 100
    weight = torch.ones(INDEX, device=cuda)
    shape = {"page_size": PAGE, "interleaved": False}
    index_write(projected[:, :INDEX], weight, weight, *where, last, keys, **shape)
    few = torch.zeros(2, PAGE * (INDEX + 4), dtype=torch.uint8, device=cuda)
    first = last - (4 * pages - 2) * PAGE
    index_write_reference(projected[:, :INDEX], weight, weight, *where, first, few, **shape)
    got, wanted = read_index_keys(keys[-2:], first, PAGE), read_index_keys(few, first, PAGE)
    assert_same_codes(got, wanted, torch.bfloat16, True)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "index_heads"), [(1, 32, 192, 32), (300, 128, 192, 64)])
def test_queries(
    tokens: int,
    heads: int,
    head_dim: int,
    index_heads: int,
    dtype: torch.dtype,
    interleaved: bool,
    fp8: bool,
    cuda: torch.device,
) -> None:
    width = heads * head_dim
    product = torch.randn(tokens, width + index_heads * INDEX, device=cuda).to(dtype)
    weights = torch.randn(tokens, index_heads, device=cuda)
    where = (rope_table(ROPE, 4096, cuda), torch.randint(0, 4096, (tokens,), device=cuda))
    step = {"num_heads": heads, "head_dim": head_dim, "rope_dim": ROPE, "interleaved": interleaved, "fp8": fp8}
    single, expected = product.clone(), product.clone()
    keys = (torch.randn(heads, head_dim - ROPE, 512, device=cuda) * head_dim**-0.5).to(dtype)
    expected_codes, expected_weights, absorbed = query_step_reference(expected, weights, *where, **step, keys=keys)
    codes, scaled, latent = query_step(product, weights, *where, **step, keys=keys)
    assert_close(latent, absorbed.double(), dtype)
    assert_close(product, expected.double(), dtype)
    query_rope(single[:, :width].view(tokens, heads, head_dim), *where, rope_dim=ROPE)
    queries = single[:, width:].view(tokens, index_heads, INDEX)
    turn = {"rope_dim": ROPE, "interleaved": interleaved, "fp8": fp8}
    single_codes, single_weights = index_query(queries, weights, *where, **turn)
    assert_close(single, expected.double(), dtype)
    for got, got_weights in ((codes, scaled), (single_codes, single_weights)):
        torch.testing.assert_close(got_weights, expected_weights, rtol=1e-5, atol=1e-8)
        assert_same_codes(got.double(), expected_codes.double(), dtype, fp8)


def test_the_references_of_one_launch_are_those_of_the_single_functions(cuda: torch.device) -> None:
    product = torch.randn(5, 4 * 192 + 2 * INDEX, device=cuda)
    weights, positions = torch.randn(5, 2, device=cuda), torch.arange(5, device=cuda)
    where = (rope_table(ROPE, 64, cuda), positions)
    other = product.clone()
    codes, scaled, _ = query_step_reference(
        product, weights, *where, num_heads=4, head_dim=192, rope_dim=ROPE, interleaved=True, fp8=True
    )
    query_rope_reference(other[:, :768].view(5, 4, 192), *where, rope_dim=ROPE)
    turn = {"rope_dim": ROPE, "interleaved": True, "fp8": True}
    expected, expected_weights = index_query_reference(other[:, 768:].view(5, 2, INDEX), weights, *where, **turn)
    assert torch.equal(product, other)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scaled, expected_weights)
