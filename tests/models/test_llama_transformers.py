"""Small random models of every architecture against transformers, written by transformers and read by us."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benthic.models.llama import LlamaModel
from benthic.models.registry import load_model
from benthic.weights.locate import locate
from tests.support.model_driver import ModelDriver

SIZES: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {"head_dim": 16}),
    "llama3-rope": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-rope": (
        "Llama",
        {"head_dim": 32, "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ),
    "llama-biases": ("Llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LlamaModel]:
    family, changes = MODELS[request.param]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    torch.manual_seed(5)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # biases and norms that do something, logits with some spread
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder, max_shard_size="100KB")
    return reference, load_model(locate(str(folder)), torch.device("cpu"), torch.float32)


def assert_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (150,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def expected(pair: tuple[Any, LlamaModel], tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return pair[0](torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("chunk", [None, 1, 48])
def test_prefill_equals_transformers(
    pair: tuple[Any, LlamaModel], tokens: list[int], expected: torch.Tensor, chunk: int | None
) -> None:
    assert_logits(ModelDriver(pair[1]).prefill(tokens, chunk), expected)


def test_cached_decode_equals_transformers(
    pair: tuple[Any, LlamaModel], tokens: list[int], expected: torch.Tensor
) -> None:
    driver = ModelDriver(pair[1])
    driver.prefill(tokens[:90])
    decoded = torch.cat([driver.step({0: token}, {}) for token in tokens[90:]])
    assert_logits(decoded, expected[90:])


def test_config_is_read_as_transformers_wrote_it(pair: tuple[Any, LlamaModel]) -> None:
    theirs, ours = pair[0].config, pair[1].config
    assert (ours.num_heads, ours.num_kv_heads, ours.num_layers) == (6, 2, 3)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (1,)


def test_a_checkpoint_without_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from benthic.common.errors import ModelError

    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SIZES | {"head_dim": 16}))).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    norm = stored.pop("model.layers.1.self_attn.k_norm.weight")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_norm\.weight'"):
        load_model(locate(str(tmp_path)), torch.device("cpu"), torch.float32)
    stored["model.layers.1.self_attn.k_norm.weight"] = norm[:8].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"k_norm\.weight' has shape \[8\], the config wants \[16\]"):
        load_model(locate(str(tmp_path)), torch.device("cpu"), torch.float32)
