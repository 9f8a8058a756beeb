"""Products whose input is spread over the ranks of tensor parallelism: each has some columns of the weight."""

import torch

from benthic.layers.linear import Linear
from benthic.parallel.collectives import Collectives


class LinearSum:
    """y = the sum over the ranks of their products. A bias is given to one of them, so that it is added once."""

    __slots__ = ("_group", "_own")

    def __init__(self, own: Linear, group: Collectives) -> None:
        self._own = own
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, this rank's in] -> [n, out], the same on every rank; n is equal on all."""
        product = self._own(x)
        return self._group.all_reduce(product.to(sum_dtype(product))).to(product.dtype)


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """In which dtype to add up what ranks have made of a tensor like `x`.

    On the CPU float32: one rounding at the end, as a single rank has, and the sum of bfloat16 numbers in float32 is
    cheap beside CPU products. On a GPU the dtype itself: float32 would double what goes through the links.
    """
    return torch.float32 if x.device.type == "cpu" else x.dtype
