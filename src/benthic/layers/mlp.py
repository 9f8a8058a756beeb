"""The gated feed-forward block of Llama: down(silu(gate x) · up x)."""

import torch
import torch.nn.functional as F

from benthic.layers.linear import Linear


class GatedMLP:
    """Gate and up are one product: `gate_up` has the gate's rows first."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))
