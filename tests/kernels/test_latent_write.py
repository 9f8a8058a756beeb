"""latent_write, index_write and both in one launch (latent_step): Triton and the references against float64."""

import pytest
import torch

from benthic.kernels.index_write import index_write, index_write_reference
from benthic.kernels.index_write.kernel import index_write_triton
from benthic.kernels.latent_step import IndexStep, latent_step, latent_step_reference
from benthic.kernels.latent_step.kernel import latent_step_triton
from benthic.kernels.latent_write import latent_write, latent_write_reference
from benthic.kernels.latent_write.kernel import latent_write_triton
from tests.support.attention_cases import assert_close
from tests.support.latent_pools import assert_near_e4m3, read_index_keys, read_latents, rope_table, turn
from tests.support.triton_interpreter import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLOTS = (17, 3, 8, 30, 9)  # pages of 8, the last one scratch
PAGE, PAGES = 8, 4


def latent_pool(rank: int, rope_dim: int, dtype: torch.dtype, fp8: bool) -> torch.Tensor:
    """One layer of a pool in whose bytes nothing is a sensible value."""
    if fp8:
        size = rank + 4 * -(-rank // 128) + 2 * rope_dim
        return torch.full((PAGES, PAGE, size), 0xFF, dtype=torch.uint8, device=DEVICE)
    return torch.full((PAGES, PAGE, rank + rope_dim), float("nan"), dtype=dtype, device=DEVICE)


def index_pool(size: int, dtype: torch.dtype, fp8: bool) -> torch.Tensor:
    """As `latent_pool`, of index keys."""
    if fp8:
        return torch.full((PAGES, PAGE * (size + 4)), 0xFF, dtype=torch.uint8, device=DEVICE)
    return torch.full((PAGES, PAGE, size), float("nan"), dtype=dtype, device=DEVICE)


def where() -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slots of the five tokens."""
    return torch.tensor([0, 40, 3, 3, 63], device=DEVICE), torch.tensor(SLOTS, device=DEVICE)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def index_key(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, inter: bool
) -> torch.Tensor:
    key = torch.nn.functional.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), 1e-6)
    p = table.shape[1]
    return torch.cat([turn(key[:, :p], table, positions, inter), key[:, p:]], -1)


def check_latents(
    pool: torch.Tensor, projected: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, rank: int
) -> None:
    positions, slots = where()
    latent, rope = read_latents(pool, slots, rank)
    expected, expected_rope = (
        normed(projected[:, :rank], weight, 1e-5),
        turn(projected[:, rank:], table, positions, True),
    )
    if pool.dtype == torch.uint8:
        assert_near_e4m3(latent, expected, 128)
        assert_close(rope, expected_rope, torch.bfloat16)
    else:
        assert_close(latent, expected, pool.dtype)
        assert_close(rope, expected_rope, pool.dtype)


def untouched(pool: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whether what lies outside the slots is as it was made."""
    other = [s for s in range(PAGES * PAGE) if s not in SLOTS]
    rest = tokens[other]
    return (rest == 0xFF).all() if pool.dtype == torch.uint8 else rest.isnan().all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "rope_dim"), [(32, 16), (128, 6), (320, 32), (512, 64)])
@pytest.mark.parametrize("write", [latent_write_triton, latent_write_reference, latent_write])
def test_latents_are_written(write: object, rank: int, rope_dim: int, dtype: torch.dtype, fp8: bool) -> None:
    product = torch.randn(5, rank + rope_dim + 7, device=DEVICE).to(dtype)
    projected = product[:, 4 : 4 + rank + rope_dim]  # columns of a wider product
    weight = torch.randn(rank, device=DEVICE).to(dtype)
    pool, table, (positions, slots) = (
        latent_pool(rank, rope_dim, dtype, fp8),
        rope_table(rope_dim, device=DEVICE),
        where(),
    )
    write(projected, weight, 1e-5, table, positions, slots, pool, rank=rank)
    check_latents(pool, projected, weight, table, rank)
    assert untouched(pool, pool.flatten(0, 1))


def test_a_latent_of_zeros_is_written_as_zeros() -> None:
    for write in (latent_write_triton, latent_write_reference):
        pool, table, (positions, slots) = (
            latent_pool(32, 16, torch.float32, True),
            rope_table(16, device=DEVICE),
            where(),
        )
        write(
            torch.zeros(5, 48, device=DEVICE),
            torch.ones(32, device=DEVICE),
            1e-5,
            table,
            positions,
            slots,
            pool,
            rank=32,
        )
        latent, rope = read_latents(pool, slots, 32)
        assert (latent == 0).all()
        assert (rope == 0).all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("size", "rope_dim", "dtype"), [(32, 16, DTYPES[0]), (128, 64, DTYPES[2]), (48, 48, DTYPES[1])]
)
@pytest.mark.parametrize("write", [index_write_triton, index_write_reference, index_write])
def test_index_keys_are_written(
    write: object, size: int, rope_dim: int, dtype: torch.dtype, interleaved: bool, fp8: bool
) -> None:
    projected = torch.randn(5, size + 3, device=DEVICE).to(dtype)[:, 3:]
    weight, bias = torch.randn(2, size, device=DEVICE)  # float32 in some files
    pool, table, (positions, slots) = index_pool(size, dtype, fp8), rope_table(rope_dim, device=DEVICE), where()
    write(projected, weight, bias, table, positions, slots, pool, page_size=PAGE, interleaved=interleaved)
    key, expected = (
        read_index_keys(pool, slots, PAGE),
        index_key(projected, weight, bias, table, positions, interleaved),
    )
    if fp8:
        assert_near_e4m3(key, expected, size)
    else:
        assert_close(key, expected, dtype)
        assert untouched(pool, pool.flatten(0, 1))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("indexes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [latent_step_triton, latent_step_reference, latent_step])
def test_one_launch_does_all_three(step: object, dtype: torch.dtype, indexes: bool, fp8: bool) -> None:
    q, rank, rope_dim, size = 72, 160, 16, 32
    product = torch.randn(5, q + rank + rope_dim + size + 9, device=DEVICE).to(dtype)
    q_weight, weight = torch.randn(q, device=DEVICE).to(dtype), torch.randn(rank, device=DEVICE).to(dtype)
    index_weight, bias = torch.randn(2, size, device=DEVICE).to(dtype)
    keys, pool = index_pool(size, dtype, fp8), latent_pool(rank, rope_dim, dtype, fp8)
    index = IndexStep(weight=index_weight, bias=bias, keys=keys, page_size=PAGE, interleaved=False) if indexes else None
    table, (positions, slots) = rope_table(rope_dim, device=DEVICE), where()
    out = step(product, q_weight, weight, 1e-5, table, positions, slots, pool, rank=rank, index=index)
    assert_close(out, normed(product[:, :q], q_weight, 1e-5), dtype)
    last = q + rank + rope_dim
    check_latents(pool, product[:, q:last], weight, table, rank)
    assert untouched(pool, pool.flatten(0, 1))
    if not indexes:
        assert (keys == 0xFF).all() if fp8 else keys.isnan().all()
        return
    key = read_index_keys(keys, slots, PAGE)
    expected = index_key(product[:, last : last + size], index_weight, bias, table, positions, False)
    if fp8:
        assert_near_e4m3(key, expected, size)
    else:
        assert_close(key, expected, dtype)


def test_writes_of_no_tokens_and_of_shapes_that_do_not_fit() -> None:
    x, ones, table = torch.zeros(0, 48, device=DEVICE), torch.ones(32, device=DEVICE), rope_table(16, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    pool, keys = latent_pool(32, 16, torch.float32, True), index_pool(32, torch.float32, True)
    for write in (latent_write_triton, latent_write_reference, latent_write):
        write(x, ones, 1e-5, table, none, none, pool, rank=32)
    for write in (index_write_triton, index_write_reference, index_write):
        write(x[:, :32], ones, ones, table, none, none, keys, page_size=PAGE, interleaved=True)
    assert latent_step(x, ones[:0], ones, 1e-5, table, none, none, pool, rank=32).shape == (0, 0)
    assert (pool == 0xFF).all()
    assert (keys == 0xFF).all()
    with pytest.raises(ValueError, match="latent_write"):
        latent_write(x, ones, 1e-5, table, none, none, pool[..., :-1], rank=32)
    with pytest.raises(ValueError, match="index_write"):
        index_write(x[:, :32], ones, ones, table, none, none, keys, page_size=4, interleaved=True)
    with pytest.raises(ValueError, match="latent_step"):
        latent_step(x[:, :40], ones[:8], ones, 1e-5, table, none, none, pool, rank=32)
