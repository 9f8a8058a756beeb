"""What the indexer hands to attention: turned queries, and weights with every constant factor."""

import pytest
import torch

from benthic.attention.latent import IndexNorm, Turn
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.forward import ForwardBatch
from benthic.kernels.index_query import index_query
from benthic.layers.indexer import Indexer
from tests.support.latent_steps import Drawn, latent_spec, step_case, write

HEADS, SIZE, HIDDEN = 4, 32, 20


def make_indexer(drawn: Drawn, dtype: torch.dtype = torch.float32) -> Indexer:
    head_weights = torch.randn(HEADS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight, bias = drawn.index_norm
    return Indexer(IndexNorm(ordinal=0, weight=weight, bias=bias, interleaved=True), head_weights)


class Noting(TorchLatentBackend):
    """Keeps what is asked for."""

    given: tuple[torch.Tensor, torch.Tensor]

    def select(
        self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, metadata: object
    ) -> torch.Tensor:
        assert ordinal == 0
        self.given = queries.clone(), weights.clone()
        return super().select(ordinal, queries, weights, batch, metadata)  # type: ignore[arg-type]  # its own metadata


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_turned_and_weights_are_float32_products_with_the_factors_of_heads_and_size(
    dtype: torch.dtype,
) -> None:
    case = step_case(latent_spec(torch.device("cpu"), topk=8), [60], [30], 0)
    step = case.step
    attention = case.new_backend(Noting)
    assert isinstance(attention, Noting)
    write(attention, step)
    x = torch.randn(len(step.queries), HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    heads = torch.cat((step.q_latent, step.q_rope), -1)
    product = torch.cat((heads.flatten(1), step.queries.flatten(1)), 1)
    metadata = attention.begin(step.batch)
    keys = torch.randn(heads.shape[1], step.q_latent.shape[2], 8)
    selected, latent = make_indexer(step, dtype).select(
        x, product, heads.shape[2], keys, step.turn, step.batch, attention, metadata
    )
    torch.testing.assert_close(latent, torch.bmm(step.q_latent.transpose(0, 1), keys).transpose(0, 1))
    queries, weights = attention.given
    assert weights.dtype == torch.float32
    head_weights = torch.randn(HEADS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = x.double() @ head_weights.double().T * HEADS**-0.5 * SIZE**-0.5
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    turn: Turn = step.turn
    wanted, _ = index_query(
        step.queries.clone(), weights, turn.table, turn.positions, rope_dim=16, interleaved=True, fp8=False
    )
    torch.testing.assert_close(queries, wanted)
    assert ((selected >= 0) & (selected <= step.batch.positions[:, None])).all()
