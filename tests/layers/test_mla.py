"""Latent attention, absorbed and paged, against the same layer with a key and a value for every head."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from benthic.attention.latent import LayerNorms, Turn
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.layers.linear import Linear
from benthic.layers.mla import LatentAttention, LatentWeights
from tests.support.latent_steps import latent_spec, make_pools, rope_table, step_case

HIDDEN, QUERY, HEADS, RANK, NOPE, ROPE, VALUE, EPS = 24, 20, 4, 32, 12, 16, 10, 1e-5
TOKENS = 21


class Given:
    """The weights as a checkpoint has them."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(4)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng) * shape[-1] ** -0.5

        self.q_a, self.kv_a = normal(QUERY, HIDDEN), normal(RANK + ROPE, HIDDEN)
        self.q_norm, self.kv_norm = torch.rand(QUERY, generator=rng) + 0.5, torch.rand(RANK, generator=rng) + 0.5
        self.q_b, self.kv_b = normal(HEADS * (NOPE + ROPE), QUERY) * 3, normal(HEADS * (NOPE + VALUE), RANK) * 3
        self.out = normal(HIDDEN, HEADS * VALUE)

    def layer(self) -> LatentAttention:
        both = self.kv_b.view(HEADS, NOPE + VALUE, RANK)
        keys, values = both[:, :NOPE], both[:, NOPE:]
        weights = LatentWeights(
            inward=Linear(torch.cat((self.q_a, self.kv_a))),
            norms=LayerNorms(query=self.q_norm, latent=self.kv_norm, eps=EPS, index=None),
            queries=Linear(self.q_b),
            keys=keys.contiguous(),
            values=values.transpose(1, 2).contiguous(),
            outward=Linear(self.out),
        )
        return LatentAttention(weights, ROPE, None)

    def expanded(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention of one sequence x [T, D] in float64, keys and values per head."""
        w = {name: tensor.double() for name, tensor in vars(self).items()}
        x = x.double()
        q = F.rms_norm(x @ w["q_a"].T, (QUERY,), w["q_norm"], EPS) @ w["q_b"].T
        q_nope, q_rope = q.view(-1, HEADS, NOPE + ROPE).split((NOPE, ROPE), -1)
        latent, k_rope = (x @ w["kv_a"].T).split((RANK, ROPE), -1)
        latent = F.rms_norm(latent, (RANK,), w["kv_norm"], EPS)
        k_nope, v = (latent @ w["kv_b"].T).view(-1, HEADS, NOPE + VALUE).split((NOPE, VALUE), -1)
        q = torch.cat((q_nope, turned(q_rope)), -1)
        k = torch.cat((k_nope, turned(k_rope.unsqueeze(1)).expand(-1, HEADS, -1)), -1)
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(1)
        probs = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hts,shv->thv", probs, v).flatten(1) @ w["out"].T


def turned(x: torch.Tensor) -> torch.Tensor:
    """x [T, ..., P], each token by its row, interleaved: as complex numbers."""
    cos, sin = rope_table(ROPE)[: len(x)].double().unsqueeze(1).chunk(2, -1)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.complex(cos, sin)).flatten(
        -2
    )


class Hooks:
    """Notes what happens to KV, and when."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def before_layer(self, index: int) -> None:
        self.seen.append(f"before {index}")

    def after_layer(self, index: int) -> None:
        self.seen.append(f"after {index}")

    def begin(self) -> None: ...
    def before_all(self) -> None: ...
    def after_all(self) -> None: ...
    def end(self, failed: bool) -> None: ...


class Noting(TorchLatentBackend):
    """Tells the hooks' list of its reads and writes."""

    seen: list[str]

    def take_in(self, *given: Any) -> torch.Tensor:
        self.seen.append("write")
        return super().take_in(*given)

    def attend(self, *given: Any) -> torch.Tensor:
        self.seen.append("attend")
        return super().attend(*given)


def test_absorbed_attention_equals_attention_with_heads_and_stays_within_its_hooks() -> None:
    spec = latent_spec(torch.device("cpu"), topk=None, heads=HEADS, rank=RANK, rope_dim=ROPE)
    case, given, hooks = step_case(spec, [TOKENS], [TOKENS], 0), Given(), Hooks()
    batch = dataclasses.replace(case.step.batch, hooks=hooks)
    backend = Noting(spec, *make_pools(spec, case.num_pages))
    backend.seen = hooks.seen
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    turn = Turn(table=rope_table(ROPE), positions=batch.positions)
    out, selected = given.layer()(1, x.clone(), turn, batch, backend, backend.begin(batch), None)
    assert selected is None
    torch.testing.assert_close(out.double(), given.expanded(x, spec.scale), rtol=1e-4, atol=1e-4)
    assert hooks.seen == ["before 1", "write", "attend", "after 1"]
    assert not backend.latents[0].any()


def test_a_layer_without_an_indexer_attends_to_the_selection_that_it_is_given() -> None:
    spec = latent_spec(torch.device("cpu"), topk=2, heads=HEADS, rank=RANK, rope_dim=ROPE)
    case, layer = step_case(spec, [TOKENS], [TOKENS], 0), Given().layer()
    batch, turn = case.step.batch, Turn(table=rope_table(ROPE), positions=case.step.batch.positions)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(6))
    changed = x.clone()
    changed[3] = 9.0  # nobody but itself and those that select it see this token
    selected = torch.stack((batch.positions, torch.full_like(batch.positions, -1)), 1).to(torch.int32)
    selected[7, 1] = 3
    outs = []
    for inputs in (x, changed):
        backend = TorchLatentBackend(spec, *make_pools(spec, case.num_pages))
        out, used = layer(0, inputs.clone(), turn, batch, backend, backend.begin(batch), selected)
        assert used is selected
        outs.append(out)
    differ = (outs[0] - outs[1]).abs().amax(-1) > 1e-6
    assert differ.nonzero().flatten().tolist() == [3, 7]
