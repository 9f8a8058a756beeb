"""A block's entry: the residual addition, the norm and, for few rows on a GPU, the block's first products with them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from benthic.kernels import norm_products
from benthic.kernels.experts import ExpertParts
from benthic.layers.linear import Linear
from benthic.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class FirstProducts:
    """What a block makes of its normed input first: a product, and one of few outputs, times a factor, in float32."""

    wide: Linear | None
    narrow: torch.Tensor | None  # [M, D]
    factor: float = 1.0


class Made(NamedTuple):
    """Those products [T, N] and [T, M]; None: not made yet."""

    wide: torch.Tensor | None = None
    narrow: torch.Tensor | None = None


NOTHING = Made()


class Entered(NamedTuple):
    """What a block begins with."""

    x: torch.Tensor  # [T, D] normed
    residual: torch.Tensor  # [T, D] the stream
    made: Made


def enter(
    norm: RMSNorm, first: FirstProducts | None, added: torch.Tensor | ExpertParts | None, residual: torch.Tensor
) -> Entered:
    """The norm of residual + added, `added` being what the last block made; `residual` may or may not be changed."""
    if first is not None and isinstance(added, torch.Tensor) and _together(first, added):
        weight = None if first.wide is None else first.wide.row_weight
        made = norm.with_products(added, residual, weight, first.narrow, first.factor)
        return Entered(made.normed, made.residual, Made(made.product, made.narrow))
    x = norm(residual) if added is None else norm.after_add(added, residual)
    return Entered(x, residual, NOTHING)


def _together(first: FirstProducts, added: torch.Tensor) -> bool:
    """Whether one launch serves: the rows are normed once more for every few outputs."""
    if not added.is_cuda or len(added) > norm_products.MOST_TOKENS:
        return False
    if first.narrow is not None and first.narrow.dtype != added.dtype:
        return False
    if first.wide is not None:
        return len(added) == 1 and first.wide.row_weight is not None
    return first.narrow is not None
