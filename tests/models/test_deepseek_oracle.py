"""Small stored models with latent attention against what transformers (or float64) computed for them.

glm_moe_dsa: selections shared between layers, interleaved index rope; deepseek_v32: half-split index rope, YaRN, expert
groups, also from an fp8 checkpoint; deepseek_v3: dense. K is 16, prompts have 1, 9, 40 and 97 tokens.
"""

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benthic.attention.latent import LatentSpec, LayerNorms, Turn, latent_bytes
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.forward import ForwardBatch
from benthic.kernels.index_write import index_write
from benthic.kernels.latent_records import read_latents
from benthic.kernels.latent_write import latent_write
from benthic.kernels.rms_norm import rms_norm
from benthic.layers.norm import RMSNorm
from benthic.models.deepseek import DeepseekModel
from benthic.models.kv_layout import KVFormats, attention_spec, indexing_layers
from benthic.models.registry import load_model
from benthic.weights.checkpoint import SafetensorsReader
from benthic.weights.locate import locate
from tests.support.compare import assert_same_greedy, top_gaps
from tests.support.model_driver import ModelDriver

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
MODELS = ["glm_moe_dsa", "deepseek_v32", "deepseek_v3", "deepseek_v32-fp8"]
PROMPTS = range(4)
LENGTHS = (1, 9, 40, 97)


class Oracle:
    """A stored model, loaded, and what was computed for it."""

    def __init__(self, name: str, scratch: Path) -> None:
        folder = ORACLES / name
        model = load_model(locate(str(folder)), torch.device("cpu"), torch.float32)
        assert isinstance(model, DeepseekModel)
        self.model = model
        (scratch / "model.safetensors").symlink_to(folder / "reference.safetensors")
        self._reader = SafetensorsReader(scratch)
        self._tolerance = json.loads((folder / "reference.json").read_text())["tolerance"]

    def __call__(self, prompt: int, name: str) -> torch.Tensor:
        return self._reader.load(f"prompt{prompt}.{name}")

    def has(self, name: str) -> bool:
        return f"prompt0.{name}" in self._reader.names()

    def tokens(self, prompt: int) -> list[int]:
        tokens: list[int] = self(prompt, "tokens").tolist()
        return tokens

    def check(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Within 1e-4 of the largest value."""
        torch.testing.assert_close(actual, expected, rtol=0, atol=self._tolerance * expected.abs().max().item())


@pytest.fixture(scope="module", params=MODELS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(request.param, tmp_path_factory.mktemp("oracle"))


class Watched(TorchLatentBackend):
    """Keeps every selection: (indexing layer's ordinal, positions of the tokens, selected)."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def select(
        self, ordinal: int, queries: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, metadata: Any
    ) -> torch.Tensor:
        selected = super().select(ordinal, queries, weights, batch, metadata)
        self.seen.append((ordinal, batch.positions, selected))
        return selected


def watched_driver(model: DeepseekModel, **how: Any) -> ModelDriver:
    driver = ModelDriver(model, **how)
    driver.attention = Watched(driver.spec, driver.pools["target_kv"], driver.pools.get("index_k"))
    return driver


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefill_logits_equal_the_reference_for_every_chunk_size(oracle: Oracle, prompt: int, page_size: int) -> None:
    tokens = oracle.tokens(prompt)
    for chunk in [*range(page_size, len(tokens), page_size), len(tokens)]:
        logits = ModelDriver(oracle.model, page_size=page_size).prefill(tokens, chunk)
        oracle.check(logits, oracle(prompt, "logits"))


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_need_not_be_whole_pages(oracle: Oracle, chunk: int) -> None:
    oracle.check(ModelDriver(oracle.model).prefill(oracle.tokens(3), chunk), oracle(3, "logits"))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_cached_decode_equals_the_reference(oracle: Oracle, prompt: int) -> None:
    expected = oracle(prompt, "greedy_logits")
    tokens, logits = ModelDriver(oracle.model).greedy(oracle.tokens(prompt), len(expected))
    oracle.check(logits, expected)
    assert assert_same_greedy(tokens, oracle(prompt, "greedy_tokens").tolist(), top_gaps(expected), 1e-3) > 0


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("chunk", [4, 20, 97])
def test_mixed_steps_equal_the_reference(oracle: Oracle, chunk: int, page_size: int) -> None:
    """All prompts share steps: short ones decode, across K, while the long one is still in chunks."""
    driver = ModelDriver(oracle.model, rows=len(PROMPTS), page_size=page_size)
    prompts = [oracle.tokens(p) for p in PROMPTS]
    greedy = [oracle(p, "greedy_tokens").tolist() for p in PROMPTS]
    expected = [oracle(p, "greedy_logits") for p in PROMPTS]
    done = [0] * len(PROMPTS)
    while min(done) < 24:
        decode = {r: greedy[r][done[r] - 1] for r in PROMPTS if 0 < done[r] < 24}
        prefill: dict[int, Sequence[int]] = {
            r: prompts[r][driver.lens[r] : driver.lens[r] + chunk] for r in PROMPTS if not done[r]
        }
        logits = driver.step(decode, prefill)
        last = torch.tensor([len(t) for t in prefill.values()], dtype=torch.int64).cumsum(0) + len(decode) - 1
        for row, at in zip([*decode, *prefill], [*range(len(decode)), *last.tolist()], strict=True):
            if driver.lens[row] >= len(prompts[row]):
                oracle.check(logits[at], expected[row][done[row]])
                done[row] += 1
    assert done == [24] * len(PROMPTS)


@pytest.mark.parametrize("chunk", [4, 23, None])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_selections_equal_the_reference(oracle: Oracle, prompt: int, chunk: int | None) -> None:
    driver = watched_driver(oracle.model)
    driver.prefill(oracle.tokens(prompt), chunk)
    layers, topk = indexing_layers(oracle.model.config), 16
    if not layers or LENGTHS[prompt] <= topk:
        assert not driver.attention.seen
        return
    expected = torch.stack([oracle(prompt, f"selected.{layer}") for layer in layers]).bool()
    compared = torch.zeros(expected.shape[:2], dtype=torch.int64)
    for ordinal, positions, selected in driver.attention.seen:
        for position, row in zip(positions.tolist(), selected.tolist(), strict=True):
            chosen = [p for p in row if p >= 0]
            assert sorted(chosen) == expected[ordinal, position].nonzero().flatten().tolist()
            compared[ordinal, position] += 1
    assert (compared <= 1).all()
    assert (compared[:, topk:] == 1).all()


class Tapped(RMSNorm):
    """A block's first norm, which sees the residual stream that the layer below left."""

    __slots__ = ("_norm", "_seen")

    def __init__(self, norm: RMSNorm, seen: list[torch.Tensor]) -> None:
        self._norm = norm
        self._seen = seen

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x)

    def after_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed = self._norm.after_add(x, residual)
        self._seen.append(residual.clone())
        return normed


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_layers_output_equals_the_reference(oracle: Oracle, prompt: int) -> None:
    if not oracle.has("layer_out"):  # of quantised variants only the logits are stored
        pytest.skip("no layer outputs are stored for this model")
    seen: list[torch.Tensor] = []
    model = copy.copy(oracle.model)
    model.layers = tuple(
        dataclasses.replace(layer, attention_norm=Tapped(layer.attention_norm, seen)) for layer in model.layers
    )
    model._norm = Tapped(model._norm, seen)
    ModelDriver(model).prefill(oracle.tokens(prompt))
    oracle.check(torch.stack(seen), oracle(prompt, "layer_out"))


class Dequantised(TorchLatentBackend):
    """Has float32 pools, which hold what the fp8 ones would: codes times scales."""

    def take_in(
        self, layer: int, product: torch.Tensor, norms: LayerNorms, turn: Turn, batch: ForwardBatch
    ) -> torch.Tensor:
        tokens, rank, middle = torch.arange(len(product)), self.spec.rank, len(norms.query)
        last = middle + rank + self.spec.rope_dim
        codes = torch.zeros(len(tokens), 1, latent_bytes(rank, self.spec.rope_dim, 4, fp8=True), dtype=torch.uint8)
        where = (turn.table, turn.positions, tokens)
        latent_write(product[:, middle:last], norms.latent, norms.eps, *where, codes, rank=rank)
        values = read_latents(codes, tokens, torch.zeros_like(tokens), rank)
        self.latents[layer].view(-1, values.shape[1])[batch.kv_slots] = values
        if norms.index is not None:
            assert self.index_keys is not None
            size = len(norms.index.weight)
            codes = torch.zeros(len(tokens), size + 4, dtype=torch.uint8)
            index_write(
                product[:, last:], norms.index.weight, norms.index.bias, *where, codes,
                page_size=1, interleaved=norms.index.interleaved,
            )  # fmt: skip
            scales = codes[:, size:].contiguous().view(torch.float32)
            values = codes[:, :size].view(torch.float8_e4m3fn).float() * scales
            self.index_keys[norms.index.ordinal].view(-1, size)[batch.kv_slots] = values
        return rms_norm(product[:, :middle], norms.query, norms.eps)


@pytest.mark.parametrize("chunk", [None, 13])
def test_fp8_caches_equal_a_float_model_over_what_they_hold(oracle: Oracle, chunk: int | None) -> None:
    """To 1e-5 of the largest logit; without fp8 the logits are elsewhere."""
    config, tokens = oracle.model.config, oracle.tokens(3)
    formats = KVFormats(dtype=torch.float32, target_fp8=True, index_fp8=config.indexer is not None)
    actual = ModelDriver(oracle.model, formats=formats).prefill(tokens, chunk)
    reference = ModelDriver(oracle.model)
    spec = attention_spec(config, page_size=16, formats=formats, device=torch.device("cpu"), max_seq_len=256)
    assert isinstance(spec, LatentSpec)
    reference.attention = Dequantised(spec, reference.pools["target_kv"], reference.pools.get("index_k"))
    expected, largest = reference.prefill(tokens, chunk), oracle(3, "logits").abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * largest)
    assert (actual - oracle(3, "logits")).abs().max().item() > 1e-3 * largest


def test_one_token_repeated_is_the_same_for_every_chunk_size(oracle: Oracle) -> None:
    """Case F5: far more equal tokens than K."""
    tokens = [17] * 64
    whole = ModelDriver(oracle.model).prefill(tokens)
    for chunk in (1, 2, 3, 7, 15, 16, 17, 31, 33, 63):
        logits = ModelDriver(oracle.model).prefill(tokens, chunk)
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4 * whole.abs().max().item())
