"""A mixture of experts with sigmoid scores and a correction bias (https://arxiv.org/abs/2412.19437, section 2.1.2)."""

import torch

from benthic.kernels.experts import experts
from benthic.kernels.moe_route import moe_route
from benthic.kernels.narrow_linear import narrow_linear
from benthic.layers.mlp import GatedMLP
from benthic.weights.dsa_config import MoEConfig


class MoE:
    """The routed experts' sum, and the shared expert's output on top.

    router [X, D], bias float32 [X], gate_up [X, 2W, D] (gate rows first), down [X, D, W]. `shared` None: it is the last
    of the stack, which then holds X + 1.
    """

    __slots__ = ("_bias", "_config", "_down", "_gate_up", "_router", "_shared")

    def __init__(
        self,
        config: MoEConfig,
        router: torch.Tensor,
        bias: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        shared: GatedMLP | None,
    ) -> None:
        self._config = config
        self._router = router
        self._bias = bias
        self._gate_up = gate_up
        self._down = down
        self._shared = shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        config = self._config
        chosen, weights = moe_route(
            narrow_linear(x, self._router),
            self._bias,
            k=config.num_experts_per_token,
            num_groups=config.num_groups,
            topk_groups=config.topk_groups,
            norm=config.norm_topk,
            scaling=config.routed_scaling,
            shared=self._shared is None,
        )
        out = experts(x, chosen, weights, self._gate_up, self._down)
        return out if self._shared is None else out.add_(self._shared(x))
