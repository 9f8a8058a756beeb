"""Llama-style models cut by heads and MLP columns: logits and caches of the ranks against those of one rank."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benthic.common.errors import ConfigError
from benthic.models.kv_layout import KVFormats
from benthic.models.llama import LlamaModel
from benthic.models.rank_shape import local_shape
from benthic.models.registry import load_model, model_namespace, open_checkpoint
from benthic.parallel.layout import ParallelLayout
from benthic.weights.locate import locate
from benthic.weights.model_config import LlamaConfig
from tests.support.dsa_shapes import LLAMA, dsa_config
from tests.support.model_driver import ModelDriver
from tests.support.random_llama import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, WIDE, write_llama, write_llama_gguf
from tests.support.thread_ranks import ThreadCollectives, run_ranks

CPU = torch.device("cpu")
TOKENS = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(2)).tolist()
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: write_llama(path),
    "llama-biases": lambda path: write_llama(path, attention_bias=True, mlp_bias=True),
    "qwen2": lambda path: write_llama(path, "qwen2"),
    "qwen3": lambda path: write_llama(path, "qwen3"),
    "gguf": lambda path: write_llama_gguf(path.with_suffix(".gguf")),
}


def layout(rank: int, size: int) -> ParallelLayout:
    return ParallelLayout(rank=rank, tp_size=size)


def run(driver: ModelDriver) -> torch.Tensor:
    """A prefill in two chunks, then steps of a decode row beside another row's prefill -> logits of all rows."""
    logits = [driver.prefill(TOKENS[:40], chunk=23)]
    logits += [driver.step({0: token}, {1: TOKENS[4 * i : 4 * i + 4]}) for i, token in enumerate(TOKENS[40:50])]
    return torch.cat(logits)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_ranks_have_the_logits_of_one_and_their_heads_of_its_cache(tmp_path: Path, name: str, size: int) -> None:
    checkpoint = open_checkpoint(locate(str(MODELS[name](tmp_path / "model"))))
    alone = ModelDriver(load_model(checkpoint, CPU, torch.float32), rows=2)
    expected = run(alone)

    def body(group: ThreadCollectives) -> tuple[torch.Tensor, ModelDriver]:
        model = load_model(checkpoint, CPU, torch.float32, None, layout(group.rank, size), group)
        driver = ModelDriver(model, rows=2)
        return run(driver), driver

    found = run_ranks(size, body)
    for rank, (logits, driver) in enumerate(found):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
        assert torch.equal(logits, found[0][0]), "the ranks differ"
        heads = KV_HEADS // size
        whole = alone.pools["target_kv"][:, :-1, :, :, rank * heads : (rank + 1) * heads]  # without the scratch page
        own = driver.pools["target_kv"][:, :-1]
        assert own.shape == whole.shape
        torch.testing.assert_close(own, whole, rtol=0, atol=1e-5 * whole.abs().max().item())


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_part_of_the_matrices_and_sums_twice_a_layer(tmp_path: Path, size: int) -> None:
    source = locate(str(write_llama(tmp_path)))

    def body(group: ThreadCollectives) -> tuple[LlamaModel, list[tuple[str, tuple[int, ...]]]]:
        model = load_model(source, CPU, torch.float32, None, layout(group.rank, size), group)
        ModelDriver(model).prefill(TOKENS[:5])
        assert isinstance(model, LlamaModel)
        return model, group.calls

    for model, calls in run_ranks(size, body):
        assert calls == [("all_reduce", (5, model.config.hidden_size))] * 2 * LAYERS
        for layer in model._layers:
            assert layer.qkv.out_features == (HEADS + 2 * KV_HEADS) * HEAD_DIM // size
            assert layer.output._own.in_features == HEADS * HEAD_DIM // size
            assert layer.mlp._gate_up.out_features == 2 * WIDE // size
            assert layer.mlp._down._own.in_features == WIDE // size


def test_bfloat16_parts_are_summed_in_float32(tmp_path: Path) -> None:
    """The ranks' roundings are all that is added: not further from float32 than one rank is, within a third."""
    source = locate(str(write_llama(tmp_path, attention_bias=True, mlp_bias=True)))
    exact = ModelDriver(load_model(source, CPU, torch.float32)).prefill(TOKENS)
    alone = ModelDriver(load_model(source, CPU, torch.bfloat16)).prefill(TOKENS)

    def body(group: ThreadCollectives) -> torch.Tensor:
        return ModelDriver(load_model(source, CPU, torch.bfloat16, None, layout(group.rank, 4), group)).prefill(TOKENS)

    for logits in run_ranks(4, body):
        assert (logits - exact).abs().mean() < 4 / 3 * (alone - exact).abs().mean()


def test_progress_reaches_the_end_on_every_rank(tmp_path: Path) -> None:
    source = locate(str(write_llama(tmp_path)))
    for rank in range(2):
        seen: list[tuple[int, int]] = []
        group = ThreadCollectives.__new__(ThreadCollectives)
        group.rank, group.size = rank, 2
        load_model(source, CPU, torch.float32, lambda *step, seen=seen: seen.append(step), layout(rank, 2), group)
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]


def llama(**changes: int) -> LlamaConfig:
    return dataclasses.replace(LLAMA, **changes)


SMOLLM2 = llama(num_heads=9, num_kv_heads=3, intermediate_size=1536)


def test_local_shape_divides_heads_and_columns() -> None:
    for rank in range(3):
        local = local_shape(SMOLLM2, layout(rank, 3))
        assert local == llama(num_heads=3, num_kv_heads=1, intermediate_size=512)
    assert local_shape(SMOLLM2, ParallelLayout(rank=1, cp_size=2)) == SMOLLM2


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (SMOLLM2, 2, "--tp 2: this llama model has 9 heads, 3 kv heads and 1536 MLP columns; --tp 1 or 3 divide"),
        (llama(num_heads=8, num_kv_heads=1), 2, "8 heads, 1 kv heads and 160 MLP columns; --tp 1 divides"),
        (llama(num_heads=8, num_kv_heads=8, intermediate_size=98), 4, "98 MLP columns; --tp 1 or 2 divide"),
        (llama(num_heads=16, num_kv_heads=8), 16, "160 MLP columns; --tp 1, 2, 4 or 8 divide"),
        (dsa_config(), 2, "--tp 2: glm_moe_dsa keeps one latent a token for all heads, .*; take --cp 2, and --ep"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(config: LlamaConfig, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        local_shape(config, layout(0, size))


def test_each_part_has_a_namespace_and_one_rank_that_of_old(tmp_path: Path) -> None:
    checkpoint, formats = open_checkpoint(locate(str(write_llama(tmp_path)))), KVFormats(dtype=torch.float32)
    old = model_namespace(checkpoint, formats, 16)
    context_parallel = model_namespace(checkpoint, formats, 16, ParallelLayout(rank=1, cp_size=2))
    parts = [model_namespace(checkpoint, formats, 16, layout(rank, size)) for size in (2, 4) for rank in range(size)]
    assert context_parallel == old
    assert len({old.digest, *(part.digest for part in parts)}) == 7
    assert parts[1].words["tensor_parallel"] == "2/1"
