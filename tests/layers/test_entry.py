"""A block's entry: one launch or several, the same comes of it."""

import pytest
import torch

from benthic.kernels import norm_products
from benthic.kernels.experts import ExpertParts
from benthic.layers import entry
from benthic.layers.entry import NOTHING, FirstProducts, enter
from benthic.layers.linear import Linear
from benthic.layers.norm import RMSNorm

SIZE = 24


def draw(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


class Row(Linear):
    """Takes part in one launch on a CPU too."""

    @property
    def row_weight(self) -> torch.Tensor:
        return draw(5, SIZE, seed=1)


@pytest.mark.parametrize(("tokens", "wide"), [(1, True), (1, False), (3, False)])
def test_one_launch_makes_what_several_make(tokens: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FirstProducts(Row(draw(5, SIZE, seed=1)) if wide else None, draw(3, SIZE, seed=2), 0.5)
    norm = RMSNorm(draw(SIZE, seed=3), 1e-5)
    added, residual = draw(tokens, SIZE, seed=4), draw(tokens, SIZE, seed=5)
    apart = enter(norm, first, added, residual.clone())
    assert apart.made == NOTHING
    monkeypatch.setattr(entry, "_together", lambda first, added: True)
    together = enter(norm, first, added, residual)
    assert torch.equal(residual, draw(tokens, SIZE, seed=5))
    assert torch.equal(together.residual, apart.residual)
    torch.testing.assert_close(together.x, apart.x)
    assert first.narrow is not None
    assert together.made.narrow is not None
    torch.testing.assert_close(together.made.narrow, apart.x.float() @ first.narrow.float().T * 0.5)
    assert (together.made.wide is not None) == wide
    if wide:
        torch.testing.assert_close(together.made.wide, apart.x @ draw(5, SIZE, seed=1).T)


def test_the_first_block_and_sums_of_experts() -> None:
    first, norm = FirstProducts(None, draw(3, SIZE, seed=2)), RMSNorm(draw(SIZE, seed=3), 1e-5)
    residual = draw(2, SIZE, seed=4)
    x, same, made = enter(norm, first, None, residual)
    assert torch.equal(x, norm(residual))
    assert same is residual
    assert made == NOTHING
    partial, weights = draw(4, SIZE, seed=5), torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    places = torch.tensor([3, 0, -1, 2], dtype=torch.int32)
    added = torch.stack((0.5 * partial[3] + 2 * partial[0], 3 * partial[2]))
    expected = residual + added
    x, residual, made = enter(norm, first, ExpertParts(partial, weights, places), residual)
    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(x, norm(residual))
    assert made == NOTHING


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "wide", "together"), [(1, True, True), (2, True, False), (2, False, True)])
def test_few_rows_on_a_gpu_take_one_launch(tokens: int, wide: bool, together: bool) -> None:
    linear = Linear(draw(5, SIZE, seed=1, device="cuda")) if wide else None
    first = FirstProducts(linear, draw(3, SIZE, seed=2, device="cuda"))
    norm = RMSNorm(draw(SIZE, seed=3, device="cuda"), 1e-5)
    added, residual = draw(tokens, SIZE, seed=4, device="cuda"), draw(tokens, SIZE, seed=5, device="cuda")
    other = residual.clone()
    x, total, made = enter(norm, first, added, residual)
    torch.testing.assert_close(x, norm.after_add(added, other))
    assert torch.equal(total, other)
    assert (made.narrow is not None) == together
    assert (made.wide is not None) == (together and wide)
    many = draw(norm_products.MOST_TOKENS + 1, SIZE, seed=6, device="cuda")
    assert enter(norm, first, many, many.clone()).made == NOTHING
