"""The gated feed-forward block of Llama: down(silu(gate x) · up x)."""

import torch

from benthic.kernels.silu_mul import silu_mul
from benthic.layers.linear import Linear
from benthic.layers.linear_sum import LinearSum


class GatedMLP:
    """Gate and up are one product: `gate_up` has the gate's rows first."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear | LinearSum) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._down(silu_mul(self._gate_up(x)))
