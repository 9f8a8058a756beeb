"""Two backends over the same pools: which one a step goes to, and that both see what either has written."""

import dataclasses
from typing import Any

import pytest
import torch

from benthic.attention.choice import Pair, choose_pair, make_pair
from benthic.attention.latent import LatentSpec
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.attention.latent_triton import TritonLatentBackend
from benthic.attention.paired import PairedBackend, PairedLatentBackend
from benthic.attention.torch_backend import TorchBackend
from benthic.attention.triton_backend import TritonBackend
from benthic.common.errors import ConfigError
from benthic.forward import ForwardBatch
from tests.attention.test_choice import GROUPED, LATENT
from tests.support.latent_steps import attend, latent_spec, make_pools, select, step_case, write

CPU = torch.device("cpu")


def watched(backend: Any, seen: list[str]) -> Any:
    """The backend, which notes what begins on it."""
    begin = backend.begin

    def noting(batch: ForwardBatch) -> Any:
        seen.append(backend.name)
        return begin(batch)

    backend.begin = noting
    return backend


def paired(spec: LatentSpec, num_pages: int, seen: list[str]) -> tuple[PairedLatentBackend, list[torch.Tensor]]:
    latents, keys = make_pools(spec, num_pages)
    assert keys is not None
    parts = [watched(kind(spec, latents, keys), seen) for kind in (TorchLatentBackend, TritonLatentBackend)]
    return PairedLatentBackend(*parts), [latents, keys]


@pytest.mark.parametrize(
    ("num_decode", "seq_lens", "query_lens", "name"),
    [(2, [40, 9], [1, 1], "triton"), (1, [40, 60], [1, 20], "torch"), (0, [60], [20], "torch")],
)
def test_a_step_goes_whole_to_the_backend_of_its_use(
    num_decode: int, seq_lens: list[int], query_lens: list[int], name: str
) -> None:
    case, seen = step_case(latent_spec(CPU), seq_lens, query_lens, num_decode), []  # type: ignore[var-annotated]
    backend, pools = paired(case.spec, case.num_pages, seen)
    alone = case.new_backend(TorchLatentBackend)
    for one in (backend, alone):
        if one is backend:
            write(one, case.history)
        write(one, case.step)
    torch.testing.assert_close(pools, [alone.latents, alone.index_keys], rtol=0, atol=1e-6)
    found, expected = select(backend, case.step), select(alone, case.step)
    assert found is not None
    assert expected is not None
    out = attend(backend, case.step, found)
    torch.testing.assert_close(out, attend(alone, case.step, expected), rtol=1e-4, atol=1e-4)
    assert set(seen) == {name}
    short = dataclasses.replace(case.step.batch, seq_lens_host=(20,) * len(seq_lens))
    assert not backend.needs_selection(backend.begin(short))


def test_grouped_attention_is_paired_too() -> None:
    pool, seen = torch.zeros(2, 3, 2, 16, 2, 64), []  # type: ignore[var-annotated]
    parts = [watched(kind(GROUPED, pool), seen) for kind in (TorchBackend, TritonBackend)]
    backend = PairedBackend(*parts)
    batch = ForwardBatch(
        num_tokens=1, num_decode=1, max_seq_len=1, max_query_len=0, input_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64), kv_slots=torch.tensor([16]),
        seq_lens=torch.ones(1, dtype=torch.int32), page_table=torch.tensor([[1]], dtype=torch.int32),
        cu_query_lens=torch.zeros(1, dtype=torch.int32), seq_lens_host=(1,),
    )  # fmt: skip
    q, k, v = torch.randn(1, 4, 64), torch.randn(1, 2, 64), torch.randn(1, 2, 64)
    prefill = dataclasses.replace(
        batch, num_decode=0, max_query_len=1, query_lens_host=(1,), cu_query_lens=torch.tensor([0, 1]).int()
    )
    for one, name in ((batch, "triton"), (prefill, "torch")):
        seen.clear()
        out = backend.attend(1, q, k, v, one, backend.begin(one))
        torch.testing.assert_close(out, v.repeat_interleave(2, 1))  # a single token sees itself
        assert seen == [name]
    assert torch.equal(pool[1, 1, 0, 0], k[0])


def test_one_name_makes_one_backend_and_two_make_a_pair() -> None:
    assert choose_pair(None, "torch", GROUPED) == Pair(TorchBackend, TorchBackend)
    assert choose_pair(None, None, LATENT).name == "torch"
    pair = Pair(TorchLatentBackend, TritonLatentBackend)
    assert pair.name == "prefill=torch,decode=triton"
    latents, keys = make_pools(LATENT, 4)
    assert keys is not None
    pools = {"target_kv": latents, "index_k": keys}
    assert isinstance(make_pair(pair, LATENT, pools), PairedLatentBackend)
    assert isinstance(make_pair(Pair(TorchLatentBackend, TorchLatentBackend), LATENT, pools), TorchLatentBackend)
    kv = {"target_kv": torch.zeros(2, 3, 2, 16, 2, 64)}
    assert isinstance(make_pair(Pair(TorchBackend, TritonBackend), GROUPED, kv), PairedBackend)
    with pytest.raises(ConfigError, match="--attention-backend triton can't be used"):
        choose_pair("torch", "triton", LATENT)
