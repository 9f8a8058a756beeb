"""Experts spread over ranks: the layer by itself for every kind of batch, and a model whose rows are on every rank."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.common.errors import ConfigError, ModelError
from benthic.layers import moe
from benthic.layers.linear import Linear
from benthic.layers.mlp import GatedMLP
from benthic.layers.moe import ExpertShare, MoE
from benthic.models.deepseek import DeepseekModel
from benthic.models.rank_shape import local_shape
from benthic.models.registry import Checkpoint, load_model, open_checkpoint
from benthic.parallel.cp_split import RankStep, split_step
from benthic.parallel.layout import ParallelLayout
from benthic.weights.dsa_config import MoEConfig
from benthic.weights.interface import TensorReader
from benthic.weights.locate import locate
from tests.support.dsa_shapes import LLAMA, dsa_config
from tests.support.model_driver import ModelDriver
from tests.support.rank_batches import moe_batch
from tests.support.thread_ranks import ThreadCollectives, run_ranks
from tests.support.tiny_dsa import DENSE_LAYERS, EXPERT_WIDE, EXPERTS, HIDDEN, LAYERS, write_dsa_checkpoint

CPU, PAGE = torch.device("cpu"), 4
WIDE, SIZE = 10, 12
CONFIG = MoEConfig(
    num_experts=8, num_experts_per_token=3, intermediate_size=WIDE, num_shared_experts=1, num_groups=4, topk_groups=2,
    norm_topk=True, routed_scaling=2.5, layers=(True,),
)  # fmt: skip
Prefills = Sequence[tuple[int, int]]  # (tokens cached, new tokens)
BATCHES: dict[str, tuple[int, Prefills]] = {
    "one decode row": (1, ()),
    "decode rows": (9, ()),
    "a prefill with a page for every segment": (0, [(0, 64)]),
    "a prefill of one token": (0, [(0, 1)]),  # most ranks have no row
    "two pages beside decode rows": (3, [(8, 7)]),
    "uneven prefills and decode rows": (2, [(0, 37), (5, 3), (16, 50)]),
}


class Layer:
    """A layer's weights, and the layer of all experts or of a rank's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=rng) * shape[-1] ** -0.5).to(dtype)

        self.router, self.bias = draw(8, SIZE), draw(8).float()
        self.gate_up, self.down = draw(8, 2 * WIDE, SIZE), draw(8, SIZE, WIDE)
        self.shared = GatedMLP(Linear(draw(2 * WIDE, SIZE)), Linear(draw(SIZE, WIDE)))

    def alone(self) -> MoE:
        return MoE(CONFIG, self.router, self.bias, self.gate_up, self.down, self.shared)

    def of(self, group: ThreadCollectives) -> MoE:
        count = 8 // group.size
        first = group.rank * count
        own = slice(first, first + count)
        share = ExpertShare(group, first)
        return MoE(CONFIG, self.router, self.bias, self.gate_up[own], self.down[own], self.shared, share)


def split(num_decode: int, prefills: Prefills, rank: int, size: int) -> RankStep:
    seq_lens = [5 + row for row in range(num_decode)] + [cached + new for cached, new in prefills]
    return split_step(
        num_decode=num_decode,
        query_lens=np.array([new for _, new in prefills], np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        page_table=np.zeros((len(seq_lens), 40), np.int32),
        page_size=PAGE,
        rank=rank,
        size=size,
    )


def check_layer(size: int, num_decode: int, prefills: Prefills, padding: int, dtype: torch.dtype) -> list[list[str]]:
    """The ranks' rows against one rank's. Returns the names of each rank's collectives."""
    layer, rng = Layer(dtype), torch.Generator().manual_seed(2)
    x = torch.randn(num_decode + sum(new for _, new in prefills), SIZE, generator=rng).to(dtype)
    expected = layer.alone()(x, moe_batch(None))

    def body(group: ThreadCollectives) -> list[str]:
        step = split(num_decode, prefills, group.rank, size)
        rows = torch.cat((x[torch.from_numpy(step.own_rows)], torch.full((padding, SIZE), float(group.rank)).to(dtype)))
        out = layer.of(group)(rows, moe_batch(step))
        assert out.shape == rows.shape
        assert out.dtype == dtype
        assert out.isfinite().all()
        wanted = expected[torch.from_numpy(step.own_rows)]
        # the sums differ in order; in bfloat16 that moves a few by one rounding
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(out[: len(wanted)], wanted, rtol=tolerance, atol=tolerance)
        if dtype != torch.float32:
            assert (out[: len(wanted)] == wanted).sum() >= 0.97 * wanted.numel()
        return [name for name, _ in group.calls]

    return run_ranks(size, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", list(BATCHES))
def test_spread_experts_give_what_one_rank_gives(name: str, size: int, dtype: torch.dtype) -> None:
    num_decode, prefills = BATCHES[name]
    calls = check_layer(size, num_decode, prefills, 3, dtype)
    expected = ["all_gather"] * bool(prefills) + ["all_reduce"] * bool(num_decode)
    assert calls == [expected + ["reduce_scatter"] * bool(prefills)] * size


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), max_size=3),
    st.integers(0, 2),
)
def test_any_batch(size: int, num_decode: int, prefills: Prefills, padding: int) -> None:
    if num_decode or prefills:
        check_layer(size, num_decode, prefills, padding, torch.float32)


def test_each_pair_is_computed_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to the experts' kernel: the ranks' ids, taken together, are the routing of one rank."""
    seen: dict[int, torch.Tensor] = {}
    layer, x, kernel = Layer(), torch.randn(30, SIZE, generator=torch.Generator().manual_seed(4)), moe.experts
    routed, _ = layer.alone()._route(x)

    def body(group: ThreadCollectives) -> None:
        layer.of(group)(x, moe_batch(None))

    def watched(rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        first = next(e for e in range(0, 8, 2) if torch.equal(layer.gate_up[e], rest[0][0]))
        assert int(chosen.max()) < 2
        seen[first] = torch.where(chosen >= 0, chosen + first, -1)
        return kernel(rows, chosen, weights, *rest)

    monkeypatch.setattr(moe, "experts", watched)
    run_ranks(4, body)
    together = torch.stack([seen[first] for first in (0, 2, 4, 6)])
    assert ((together >= 0).sum(0) == 1).all()
    assert torch.equal(together.max(0).values, routed)


class Recording:
    """A reader that notes what is loaded."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self.loaded: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    def load(self, name: str) -> torch.Tensor:
        self.loaded.append(name)
        return self._reader.load(name)


def layout(rank: int, size: int) -> ParallelLayout:
    return ParallelLayout(rank=rank, cp_size=size, expert_parallel=True)


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_reads_and_holds_its_experts_alone_and_has_the_logits_of_one_rank(tmp_path: Path, size: int) -> None:
    """Every rank runs all rows here (a batch without `ranks`)."""
    checkpoint = open_checkpoint(locate(str(write_dsa_checkpoint(tmp_path))))
    prompt = torch.randint(0, 200, (70,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = ModelDriver(load_model(checkpoint, CPU, torch.float32)).prefill(prompt, 50)

    def body(group: ThreadCollectives) -> tuple[torch.Tensor, list[str], list[tuple[int, ...]], tuple[int, int]]:
        reader, progress = Recording(checkpoint.reader), [(0, 0)]
        model = load_model(
            Checkpoint(checkpoint.config, reader), CPU, torch.float32, lambda *step: progress.append(step),
            layout(group.rank, size), group,
        )  # fmt: skip
        assert isinstance(model, DeepseekModel)
        stacks = [tuple(layer.mlp._gate_up.shape) for layer in model.layers if isinstance(layer.mlp, MoE)]
        return ModelDriver(model).prefill(prompt, 50), reader.loaded, stacks, progress[-1]

    everywhere = [name for name in checkpoint.reader.names() if ".experts." not in name]
    for rank, (logits, loaded, stacks, progress) in enumerate(run_ranks(size, body)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
        own = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        wanted = everywhere + [
            f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
            for layer in range(DENSE_LAYERS, LAYERS) for expert in own for name in ("gate", "up", "down")
        ]  # fmt: skip
        assert sorted(loaded) == sorted(wanted)
        assert stacks == [(EXPERTS // size, 2 * EXPERT_WIDE, HIDDEN)] * (LAYERS - DENSE_LAYERS)
        assert progress[0] == progress[1] == sum(checkpoint.reader.info(name).num_bytes for name in wanted)


def test_a_missing_expert_is_named_by_the_rank_that_should_hold_it(tmp_path: Path) -> None:
    folder = write_dsa_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"n_routed_experts": EXPERTS + 4}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(locate(str(folder)))
    group = ThreadCollectives.__new__(ThreadCollectives)
    group.rank, group.size = 1, 2
    with pytest.raises(ModelError, match=r"experts\.8\.gate_proj\.weight"):
        load_model(checkpoint, CPU, torch.float32, None, layout(1, 2), group)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--ep over 3 ranks: glm_moe_dsa has 8 routed experts; 1, 2, 4 or 8 ranks divide them"),
        ({"moe": dataclasses.replace(CONFIG, layers=(False,) * 5)}, "--ep: this glm_moe_dsa model has no routed exp"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(changes: dict[str, MoEConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        local_shape(dsa_config(**changes), layout(0, 3))


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ep: this llama model has no routed experts to spread; leave the flag out"):
        local_shape(LLAMA, ParallelLayout(tp_size=2, expert_parallel=True))


def test_the_shape_stays_whole() -> None:
    assert local_shape(dsa_config(), layout(1, 4)) == dsa_config()
