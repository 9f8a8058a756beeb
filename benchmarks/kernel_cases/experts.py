"""The routed experts' products, and choosing experts."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernel_cases.case import Call, Case, Sizes, assert_near, num_calls, randn
from benthic.kernels.experts import experts, experts_reference

CHECKED = 16  # tokens


def cases(sizes: Sizes) -> Iterator[Case]:
    """Decode batches, which stream weights, and prefill chunks, which compute."""
    gate_up = randn(sizes.num_experts, 2 * sizes.wide, sizes.hidden, sizes=sizes).mul_(0.02)
    down = randn(sizes.num_experts, sizes.hidden, sizes.wide, sizes=sizes).mul_(0.02)
    for batch in sizes.batches:
        yield _streaming(sizes, gate_up, down, batch)
    for tokens in sizes.tokens:
        yield _computing(sizes, gate_up, down, tokens)


def _routing(sizes: Sizes, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random experts, all of a token different, int32 [T, k], and weights float32 [T, k]."""
    order = torch.rand(tokens, sizes.num_experts, device=sizes.device).argsort(-1)
    chosen = order[:, : sizes.chosen].to(torch.int32).contiguous()
    return chosen, torch.rand(tokens, sizes.chosen, device=sizes.device)


def _disjoint(sizes: Sizes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Routings of one token that share no expert: together they read every expert once."""
    whole = sizes.num_experts // sizes.chosen
    order = torch.randperm(sizes.num_experts, device=sizes.device).to(torch.int32)
    parts = order[: whole * sizes.chosen].view(whole, 1, sizes.chosen)
    return [(part, torch.rand(1, sizes.chosen, device=sizes.device)) for part in parts]


def _check(x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], *weights: torch.Tensor) -> None:
    got = experts(x, *routing, *weights)
    chosen, shares = (r[-CHECKED:] for r in routing)
    assert_near(got[-CHECKED:], experts_reference(x[-CHECKED:], chosen, shares, *weights), "experts")


def _streaming(sizes: Sizes, gate_up: torch.Tensor, down: torch.Tensor, batch: int) -> Case:
    expert_bytes = (gate_up[0].numel() + down[0].numel()) * sizes.dtype.itemsize
    x = randn(batch, sizes.hidden, sizes=sizes)
    hit_bytes = min(sizes.num_experts, batch * sizes.chosen) * expert_bytes
    routings = (
        _disjoint(sizes) if batch == 1 else [_routing(sizes, batch) for _ in range(num_calls(hit_bytes, sizes.device))]
    )
    hit = sum(len(set(chosen.flatten().tolist())) for chosen, _ in routings) / len(routings)
    return Case(
        name=f"experts_b{batch}",
        calls=[partial(experts, x, *routing, gate_up, down) for routing in routings],
        check=partial(_check, x, routings[0], gate_up, down),
        num_bytes=hit * expert_bytes,
        limit="copy",
        graph=True,
        aim="≥ 75 % of the rate",
        beside=("grouped_mm alone", [_grouped(x, routing, gate_up, down) for routing in routings]),
    )


def _computing(sizes: Sizes, gate_up: torch.Tensor, down: torch.Tensor, tokens: int) -> Case:
    x = randn(tokens, sizes.hidden, sizes=sizes)
    routing = _routing(sizes, tokens)
    return Case(
        name=f"experts_t{tokens}",
        calls=[partial(experts, x, *routing, gate_up, down)],
        check=partial(_check, x, routing, gate_up, down),
        flop=2 * tokens * sizes.chosen * 3 * sizes.wide * sizes.hidden,
        limit="bf16",
        graph=False,
        aim="≥ 600 TFLOP/s",
        beside=("grouped_mm alone", [_grouped(x, routing, gate_up, down)]),
    )


def _grouped(
    x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], gate_up: torch.Tensor, down: torch.Tensor
) -> Call:
    """torch's two grouped products on tokens that are sorted already: no activation, no sums."""
    flat = routing[0].reshape(-1).long()
    rows = x[flat.argsort() // routing[0].shape[1]]
    ends = torch.bincount(flat, minlength=len(gate_up)).cumsum(0).to(torch.int32)
    middle = torch.empty(len(rows), down.shape[2], device=x.device, dtype=x.dtype).normal_()

    def run() -> None:
        torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
        torch._grouped_mm(middle, down.transpose(1, 2), offs=ends)

    return run
