"""The sharded backends of two ranks with decode rows by the Triton kernels, beside one rank alone in plain torch."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benthic.attention.latent_torch import TorchLatentBackend
from benthic.attention.latent_triton import TritonLatentBackend
from benthic.attention.sharded import ShardedBackend
from benthic.attention.sharded_latent import ShardedLatentBackend
from benthic.attention.torch_backend import TorchBackend
from benthic.attention.triton_backend import TritonBackend
from benthic.kernels import index_scores, latent_decode, paged_decode, topk_select
from benthic.kernels.index_scores import kernel as index_scores_kernel
from benthic.kernels.latent_decode import kernel as latent_decode_kernel
from benthic.kernels.paged_decode import kernel as paged_decode_kernel
from benthic.kernels.topk_select import kernel as topk_select_kernel
from tests.attention import test_sharded, test_sharded_latent
from tests.support.latent_steps import step_case
from tests.support.thread_ranks import ThreadCollectives, run_ranks
from tests.support.triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu/test_decode_parts.py compiles them")
K = test_sharded_latent.K
ENTRIES: list[tuple[Any, Any, str]] = [
    (paged_decode, paged_decode_kernel, "paged_decode_triton"),
    (latent_decode, latent_decode_kernel, "latent_decode_triton"),
    (index_scores, index_scores_kernel, "index_scores_decode_triton"),
    (index_scores, index_scores_kernel, "index_scores_prefill_triton"),
    (topk_select, topk_select_kernel, "topk_select_triton"),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that decode rows take run in the interpreter, one at a time. The names of those that ran."""
    one, ran = threading.Lock(), []

    def in_turn(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def launch(*args: object, **named: object) -> object:
            with one:  # the interpreter is not for threads
                ran.append(name)
                return call(*args, **named)

        return launch

    for package, kernel, name in ENTRIES:
        monkeypatch.setattr(package, "use_triton", lambda tensor: True)
        monkeypatch.setattr(kernel, name, in_turn(name, getattr(kernel, name)))
    return ran


def test_grouped_queries(interpreted: list[str]) -> None:
    """Rows of one page are with one rank alone; prefill rows go beside them."""
    seq_lens, query_lens = [2, 33, 8, 21], [1, 1, 1, 21]
    world = test_sharded.Sequences(seq_lens, 2)
    firsts = [n - q for n, q in zip(seq_lens, query_lens, strict=True)]
    batch = world.batch(firsts, seq_lens, 3, range(4))
    test_sharded.check_steps(world, [test_sharded.Step(batch, world.lanes, padding=2)], TritonBackend)
    assert interpreted == ["paged_decode_triton"] * 2 * test_sharded.LAYERS


@pytest.mark.parametrize("form", test_sharded_latent.FORMATS[1:4], ids=str)
def test_latents(form: dict[str, Any], interpreted: list[str]) -> None:
    """Two rows are on one rank alone or have few positions on each, the third has many; a prefill row goes beside."""
    case = step_case(test_sharded_latent.spec_with(**form), [2, K + 1, 41, 21], [1, 1, 1, 21], 3)
    test_sharded_latent.check_step(case, 2, TritonLatentBackend, padding=1)
    assert interpreted.count("latent_decode_triton") == 4
    assert interpreted.count("index_scores_decode_triton") == 2 * (form["topk"] is not None)


def test_rows_within_k_are_not_scored(interpreted: list[str]) -> None:
    case = step_case(test_sharded_latent.spec_with(topk=K), [2, K], [1, 1], 2)
    test_sharded_latent.check_step(case, 2, TritonLatentBackend)
    assert interpreted == ["latent_decode_triton"] * 4


@pytest.mark.parametrize("decode", ["torch", "triton"])
def test_the_decode_backend_decides(decode: str, interpreted: list[str]) -> None:
    grouped, latent = (TorchBackend, TorchLatentBackend) if decode == "torch" else (TritonBackend, TritonLatentBackend)
    world = test_sharded.Sequences([9], 2)
    batch = world.batch([8], [9], 1, [0])
    drawn = test_sharded.Inputs.draw(1, torch.float32, world.rng)
    case = step_case(test_sharded_latent.spec_with(topk=None), [9], [1], 1)

    def body(group: ThreadCollectives) -> None:
        pool = world.pools[group.rank]
        backend = ShardedBackend(world.spec, pool, group, TorchBackend, grouped)
        part, own = test_sharded.rank_forward(batch, world.lanes, group)
        test_sharded.attend_all(backend, own, drawn.of(part, 1))
        latents = case.new_backend(TorchLatentBackend).latents
        sharded = ShardedLatentBackend(case.spec, latents, None, group, TorchLatentBackend, latent)
        test_sharded_latent.forward(sharded, test_sharded_latent.part_of(case.step, part, own))

    run_ranks(2, body)
    ran = {"torch": [], "triton": ["latent_decode_triton"] * 4 + ["paged_decode_triton"] * 4}
    assert sorted(interpreted) == ran[decode]
