"""query_rope, index_query and both in one launch (query_step): Triton and the references against float64."""

import pytest
import torch

from benthic.kernels.index_query import index_query, index_query_reference
from benthic.kernels.index_query import kernel as index_query_kernel
from benthic.kernels.index_query.kernel import index_query_triton
from benthic.kernels.query_rope import kernel as query_rope_kernel
from benthic.kernels.query_rope import query_rope, query_rope_reference
from benthic.kernels.query_rope.kernel import query_rope_triton
from benthic.kernels.query_step import kernel as query_step_kernel
from benthic.kernels.query_step import query_step, query_step_reference
from benthic.kernels.query_step.kernel import query_step_triton
from tests.support.attention_cases import assert_close
from tests.support.latent_pools import assert_near_e4m3, rope_table, turn
from tests.support.triton_interpreter import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POSITIONS = (0, 40, 3, 3, 63)


def where() -> torch.Tensor:
    return torch.tensor(POSITIONS, device=DEVICE)


def check_queries(
    result: tuple[torch.Tensor, torch.Tensor],
    expected: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
    fp8: bool,
) -> None:
    codes, scaled = result
    if not fp8:
        assert_close(codes, expected, dtype)
        assert torch.equal(scaled, weights)
        return
    assert codes.dtype == torch.float8_e4m3fn
    scales = expected.abs().amax(-1) / 448
    torch.testing.assert_close(scaled.double(), weights.double() * scales, rtol=1e-4, atol=1e-9)
    assert_near_e4m3(codes.double() * scales.unsqueeze(-1), expected, expected.shape[-1])


def first_turned(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    p = table.shape[1]
    return torch.cat([turn(x[..., :p], table, where(), interleaved), x[..., p:].double()], -1)


def last_turned(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1] - table.shape[1]
    return torch.cat([x[..., :n].double(), turn(x[..., n:], table, where(), True)], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "nope", "rope_dim"), [(1, 0, 6), (5, 24, 16), (33, 16, 64)])
@pytest.mark.parametrize("rotate", [query_rope_triton, query_rope_reference, query_rope])
def test_the_last_components_of_queries_turn(
    rotate: object, heads: int, nope: int, rope_dim: int, dtype: torch.dtype
) -> None:
    product = torch.randn(5, heads * (nope + rope_dim) + 11, device=DEVICE).to(dtype)
    before = product.clone()
    q = product[:, 3:-8].unflatten(1, (heads, nope + rope_dim))
    table = rope_table(rope_dim, device=DEVICE)
    expected = last_turned(q, table)
    rotate(q, table, where(), rope_dim=rope_dim)
    assert_close(q, expected, dtype)
    assert torch.equal(product[:, :3], before[:, :3])
    assert torch.equal(product[:, -8:], before[:, -8:])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "rope_dim"), [(3, 32, 16), (20, 48, 48), (32, 128, 64)])
@pytest.mark.parametrize("run", [index_query_triton, index_query_reference, index_query])
def test_index_queries_turn(
    run: object, heads: int, size: int, rope_dim: int, dtype: torch.dtype, interleaved: bool, fp8: bool
) -> None:
    queries = torch.randn(5, heads * size + 9, device=DEVICE).to(dtype)[:, 9:].unflatten(1, (heads, size))
    weights = torch.randn(5, heads + 2, device=DEVICE)[:, :heads]
    table = rope_table(rope_dim, device=DEVICE)
    expected = first_turned(queries, table, interleaved)
    result = run(queries, weights, table, where(), rope_dim=rope_dim, interleaved=interleaved, fp8=fp8)
    check_queries(result, expected, weights, dtype, fp8)


def test_a_query_of_zeros_has_codes_of_zero() -> None:
    zeros, ones, table = (
        torch.zeros(5, 2, 32, device=DEVICE),
        torch.ones(5, 2, device=DEVICE),
        rope_table(16, device=DEVICE),
    )
    for run in (index_query_triton, index_query_reference):
        codes, scaled = run(zeros, ones, table, where(), rope_dim=16, interleaved=False, fp8=True)
        assert (codes.float() == 0).all()
        assert scaled.isfinite().all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "nope", "index_heads", "size"), [(3, 24, 2, 32), (18, 16, 20, 64)])
@pytest.mark.parametrize("run", [query_step_triton, query_step_reference, query_step])
def test_one_launch_turns_both(
    run: object, heads: int, nope: int, index_heads: int, size: int, dtype: torch.dtype, fp8: bool
) -> None:
    rope_dim, width = 16, heads * (nope + 16)
    product = torch.randn(5, width + index_heads * size + 4, device=DEVICE).to(dtype)[:, 4:]
    weights, table = torch.randn(5, index_heads, device=DEVICE), rope_table(rope_dim, device=DEVICE)
    q = product[:, :width].unflatten(1, (heads, nope + rope_dim))
    expected_q = last_turned(q, table)
    expected = first_turned(product[:, width:].unflatten(1, (index_heads, size)), table, False)
    keys = torch.randn(heads, nope, 40, device=DEVICE).to(dtype)
    expected_latent = torch.einsum("thn,hnr->thr", q[..., :nope].double(), keys.double())
    shape = {"num_heads": heads, "head_dim": nope + rope_dim, "rope_dim": rope_dim}
    *result, latent = run(product, weights, table, where(), **shape, interleaved=False, fp8=fp8, keys=keys)
    assert_close(q, expected_q, dtype)
    assert_close(latent, expected_latent, dtype)
    check_queries(result, expected, weights, dtype, fp8)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_many_rows_take_other_tiles(fp8: bool, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (query_rope_kernel, index_query_kernel, query_step_kernel):
        monkeypatch.setattr(module, "MANY_ROWS", 1)
    product, weights = torch.randn(5, 20 * 24 + 15 * 64, device=DEVICE), torch.randn(5, 15, device=DEVICE)
    q, queries = product[:, :480].unflatten(1, (20, 24)), product[:, 480:].unflatten(1, (15, 64))
    table = rope_table(16, device=DEVICE)
    expected_q, expected = last_turned(q, table), first_turned(queries, table, interleaved)
    shape = {"num_heads": 20, "head_dim": 24, "rope_dim": 16, "interleaved": interleaved}
    *result, latent = query_step_triton(product, weights, table, where(), **shape, fp8=fp8)
    assert latent is None
    assert_close(q, expected_q, torch.float32)
    check_queries(result, expected, weights, torch.float32, fp8)


def test_no_tokens_and_shapes_that_do_not_fit() -> None:
    table, none = rope_table(16, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    q, weights = torch.zeros(0, 2, 32, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    for rotate in (query_rope_triton, query_rope_reference, query_rope):
        rotate(q, table, none, rope_dim=16)
    shape = {"num_heads": 2, "head_dim": 32, "rope_dim": 16}
    for fp8 in (False, True):
        for run in (index_query_triton, index_query_reference, index_query):
            codes, _ = run(q, weights, table, none, rope_dim=16, interleaved=True, fp8=fp8)
            assert codes.shape == q.shape
        for step in (query_step_triton, query_step_reference, query_step):
            codes, *_ = step(
                torch.zeros(0, 128, device=DEVICE), weights, table, none, **shape, interleaved=True, fp8=fp8
            )
            assert codes.shape == q.shape
    with pytest.raises(ValueError, match="query_rope"):
        query_rope(q, table, none, rope_dim=8)
    with pytest.raises(ValueError, match="index_query"):
        index_query(q, weights[:, :1], table, none, rope_dim=16, interleaved=True, fp8=True)
    with pytest.raises(ValueError, match="query_step"):
        query_step(torch.zeros(0, 127, device=DEVICE), weights, table, none, **shape, interleaved=True, fp8=True)
