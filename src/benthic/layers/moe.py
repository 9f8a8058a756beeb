"""A mixture of experts with sigmoid scores and a correction bias (https://arxiv.org/abs/2412.19437, section 2.1.2)."""

from dataclasses import dataclass

import torch

from benthic.forward import ForwardBatch
from benthic.kernels.experts import ExpertParts, experts, experts_before_sum
from benthic.kernels.moe_route import moe_route
from benthic.kernels.narrow_linear import narrow_linear
from benthic.layers.entry import NOTHING, FirstProducts, Made
from benthic.layers.linear_sum import sum_dtype
from benthic.layers.mlp import GatedMLP
from benthic.parallel.collectives import Collectives, padded_gather, padded_scatter
from benthic.weights.dsa_config import MoEConfig


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The routed experts are spread over the ranks of `group`; this one's stack begins with expert `first`."""

    group: Collectives
    first: int


class MoE:
    """The routed experts' sum, and the shared expert's output on top.

    router [X, D], bias float32 [X], gate_up [X, 2W, D] (gate rows first), down [X, D, W]. `shared` None: it is the last
    of the stack, which then holds X + 1. With a `share` the stack holds this rank's routed experts alone.
    """

    __slots__ = ("_bias", "_config", "_down", "_gate_up", "_router", "_share", "_shared", "first")

    def __init__(
        self,
        config: MoEConfig,
        router: torch.Tensor,
        bias: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        shared: GatedMLP | None,
        share: ExpertShare | None = None,
    ) -> None:
        assert share is None or shared is not None, "every rank would add the shared expert of its stack"
        self._config = config
        self._router = router
        self._bias = bias
        self._gate_up = gate_up
        self._down = down
        self._shared = shared
        self._share = share
        self.first = FirstProducts(None, router) if share is None else None  # else rows come from other ranks too

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, made: Made = NOTHING) -> torch.Tensor | ExpertParts:
        """Rows [T, D] of the batch -> [T, D], or its parts. With a share every rank takes part, those without rows too.

        Rows behind those that `batch.ranks` counts are padding; what comes of them is finite and means nothing. `made`:
        what there is of `first` already.
        """
        if self._shared is None:
            return experts_before_sum(x, *self._route(x, made.narrow), self._gate_up, self._down)
        if self._share is None:
            out = experts(x, *self._route(x, made.narrow), self._gate_up, self._down)
        else:
            out = self._spread(x, batch, self._share)
        return out.add_(self._shared(x))

    def _route(self, x: torch.Tensor, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows [n, D], or their logits: experts int32 [n, k] out of all ranks', and weights float32 [n, k]."""
        config = self._config
        return moe_route(
            narrow_linear(x, self._router) if logits is None else logits,
            self._bias,
            k=config.num_experts_per_token,
            num_groups=config.num_groups,
            topk_groups=config.topk_groups,
            norm=config.norm_topk,
            scaling=config.routed_scaling,
            shared=self._shared is None,
        )

    def _spread(self, x: torch.Tensor, batch: ForwardBatch, share: ExpertShare) -> torch.Tensor:
        """The routed experts' sum over the ranks.

        Decode rows are on every rank (all rows of a batch without `ranks` are): their parts are added up everywhere.
        Prefill rows are gathered from their ranks, and the sums go back to them. The experts see both in one call.

        All ranks must route a row alike, or an expert would be missing, or counted twice. Products of unequal row
        counts may differ in their last bits, so beside prefill rows the first rank's decode rows count, for all.
        """
        group = share.group
        step = None if batch.ranks is None else batch.ranks.step
        num_decode, own, most = (len(x), 0, 0) if step is None else (step.num_decode, step.own_len, step.max_rank_len)
        rows = x[:num_decode]
        if most:
            every = padded_gather(group, x[: num_decode + own], num_decode + most)
            every = every.view(group.size, num_decode + most, -1)
            rows = torch.cat((every[0, :num_decode], every[:, num_decode:].flatten(0, 1)))
        part = self._own_part(rows, share.first)
        sums = []
        if num_decode:
            sums.append(group.all_reduce(part[:num_decode]).to(x.dtype))
        if most:
            sums.append(padded_scatter(group, part[num_decode:], own).to(x.dtype))
        if padding := len(x) - num_decode - own:
            sums.append(x.new_zeros((padding, x.shape[1])))
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _own_part(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """What this rank's experts add to rows [n, D] -> [n, D] in the dtype in which the ranks' parts are summed."""
        chosen, weights = self._route(rows)
        local = chosen - first
        # -1: no work here. Only ids that are in the stack stay, so a token's are still all different
        local = local.where((local >= 0) & (local < len(self._down)), -1)
        part = torch.empty(rows.shape, dtype=sum_dtype(rows), device=rows.device)
        return experts(rows, local, weights, self._gate_up, self._down, part)
