"""config.json, generation_config.json and GGUF metadata as one config, and the fields that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from benthic.common.errors import ModelError
from benthic.weights.locate import BUILT_IN, Source, locate
from benthic.weights.model_config import (
    GenerationDefaults,
    RopeConfig,
    config_from_hf,
    read_config,
    read_generation_defaults,
)

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu",
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_a_plain_config() -> None:
    config = config_from_hf(BASE, Path("m"))
    assert (config.head_dim, config.num_kv_heads, config.eos_token_ids, config.tie_embeddings) == (16, 2, (2, 3), False)
    assert config.rope == RopeConfig(theta=5e5)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)


def test_old_and_new_spelling_of_rope_are_the_same() -> None:
    old = config_from_hf(BASE | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Path("m"))
    ancient = config_from_hf(BASE | {"rope_scaling": {"type": "llama3", **LLAMA3}}, Path("m"))
    new = {k: v for k, v in BASE.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    assert old == ancient == config_from_hf(new, Path("m"))
    assert old.rope.kind == "llama3"
    assert old.rope.factor == 8.0


def test_qwen_differences() -> None:
    qwen2 = config_from_hf(BASE | {"architectures": ["Qwen2ForCausalLM"]}, Path("m"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = config_from_hf(BASE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}, Path("m"))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    for listed in (["GemmaForCausalLM"], None, [], "LlamaForCausalLM"):
        with pytest.raises(
            ModelError, match="is not supported; supported: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3For"
        ):
            config_from_hf(BASE | {"architectures": listed}, Path("m"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"config\.json: hidden_size: expected a whole number from 1 to \d+, found None"),
        ({"hidden_size": "64"}, "hidden_size: expected a whole number .*, found '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: .*found 0"),
        ({"num_hidden_layers": 5000}, "5000 layers"),
        ({"vocab_size": 1 << 40}, "vocab_size: .*found 1099511627776"),
        ({"num_attention_heads": True}, "num_attention_heads: .*found True"),
        ({"num_key_value_heads": 3}, "4 query heads can't share 3"),
        ({"head_dim": 15}, "head_dim 15: expected an even number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: expected a number from 0 to 1, found -1.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: .*found nan"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, found 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id or a list"),
        ({"eos_token_id": 100}, "end token 100: expected an id below the vocabulary's size, 100"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn' is not supported; supported: default",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope: factor: expected a number, which rope type linear needs"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings: .*found nothing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "more than low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling: expected a table"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, found 0.5"),
        ({"layer_types": 5}, "layer_types"),
    ],
)
def test_absurd_fields_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf(BASE | change, Path("m"))


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"])
def test_missing_fields_are_named(field: str) -> None:
    with pytest.raises(ModelError, match=f"{field}: expected a whole number .*, found nothing"):
        config_from_hf({k: v for k, v in BASE.items() if k != field}, Path("m"))


def write(folder: Path, generation: Any = None) -> Source:
    (folder / "config.json").write_text(json.dumps(BASE))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return locate(str(folder))


def test_generation_defaults_and_their_end_tokens(tmp_path: Path) -> None:
    assert read_generation_defaults(write(tmp_path)) == GenerationDefaults(eos_token_ids=(2, 3))
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [7, 2]}
    source = write(tmp_path, given)
    assert read_generation_defaults(source) == GenerationDefaults(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, eos_token_ids=(7, 2)
    )
    assert read_config(source).eos_token_ids == (7, 2)


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    source = write(tmp_path, {"do_sample": False, "temperature": 0.6})
    assert read_generation_defaults(source).temperature == 0
    assert read_generation_defaults(write(tmp_path, {"do_sample": True})).temperature is None


@pytest.mark.parametrize(("key", "value"), [("temperature", -1), ("top_p", 2), ("top_k", 1.5), ("eos_token_id", "x")])
def test_absurd_generation_defaults_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        read_generation_defaults(write(tmp_path, {key: value}))


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")])
def test_a_config_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json: (can't be read|expected a table)"):
        read_config(locate(str(tmp_path)))


def test_the_built_in_model() -> None:
    config = read_config(locate(BUILT_IN))
    sizes = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
    assert sizes == (30, 576, 9, 3, 64)
    assert (config.intermediate_size, config.vocab_size, config.max_position) == (1536, 49152, 8192)
    assert (config.rms_norm_eps, config.rope.theta, config.tie_embeddings) == (1e-5, 1e5, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert read_generation_defaults(locate(BUILT_IN)) == GenerationDefaults(eos_token_ids=(2,))
