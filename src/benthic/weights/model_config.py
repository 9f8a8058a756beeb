"""A model's shape and rope as one frozen value, from config.json or a GGUF file's metadata. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benthic.common.errors import ModelError
from benthic.weights.dsa_config import DsaConfig
from benthic.weights.dsa_from_hf import DSA_CLASSES, dsa_architecture, read_dsa
from benthic.weights.fields import Fields, check_tokens_and_layers, given, read_json
from benthic.weights.gguf import GGUFFile
from benthic.weights.locate import Source
from benthic.weights.quantization_config import check_no_modelopt_file, check_quantization
from benthic.weights.rope_config import RopeConfig, read_rope

__all__ = [
    "DsaConfig",
    "GenerationDefaults",
    "LlamaConfig",
    "ModelShape",
    "RopeConfig",
    "config_from_gguf",
    "config_from_hf",
    "read_config",
    "read_generation_defaults",
]

Architecture = Literal["llama", "qwen2", "qwen3"]
_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A dense decoder with grouped-query attention: Llama and its relatives."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults and end tokens of a checkpoint. None: the checkpoint says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


ModelShape = LlamaConfig | DsaConfig


def read_config(source: Source) -> ModelShape:
    """The model's config. Raises ModelError for an unknown architecture, or a missing or absurd field."""
    if source.kind == "gguf":
        return config_from_gguf(GGUFFile(source.path))
    raw = read_json(source.path / "config.json")
    check_no_modelopt_file(source.path)
    return config_from_hf(raw, source.path, _generation(source.path))


def read_generation_defaults(source: Source) -> GenerationDefaults:
    """Defaults for requests, from generation_config.json (end tokens else from the config). Raises ModelError."""
    config = read_config(source)
    if source.kind == "gguf":
        return GenerationDefaults(eos_token_ids=config.eos_token_ids)
    raw = _generation(source.path)
    given = Fields(raw, source.path / "generation_config.json")
    temperature = given.optional_number("temperature", 0.0, 100.0)
    return GenerationDefaults(
        # transformers' generate is greedy then, whatever the temperature
        temperature=0.0 if raw.get("do_sample") is False else temperature,
        top_p=given.optional_number("top_p", 0.0, 1.0),
        top_k=given.optional_count("top_k", 0),
        min_p=given.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=given.optional_number("repetition_penalty", 1e-3, 1e3),
        eos_token_ids=config.eos_token_ids,
    )


def config_from_hf(raw: Mapping[str, Any], folder: Path, generation: Mapping[str, Any] | None = None) -> ModelShape:
    """The config out of a parsed config.json; `generation` (generation_config.json) has the last word on end tokens.

    Raises ModelError for an unknown architecture or quantisation, or a field that is missing, absurd or unsupported.
    """
    fields = Fields(raw, folder / "config.json")
    dsa = dsa_architecture(raw, fields)
    eos_token_ids = Fields({**raw, **given(generation, "eos_token_id")}, fields.where).token_ids("eos_token_id")
    config = read_dsa(dsa, fields, eos_token_ids) if dsa else _llama_from_hf(raw, fields, eos_token_ids)
    check_quantization(fields)
    return config


def _llama_from_hf(raw: Mapping[str, Any], fields: Fields, eos_token_ids: tuple[int, ...]) -> LlamaConfig:
    architecture = _architecture(raw, fields)
    if raw.get("hidden_act", "silu") != "silu":
        raise fields.bad("hidden_act", "silu")
    if raw.get("use_sliding_window"):
        raise fields.bad("use_sliding_window", "false: sliding-window attention is not supported")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise fields.bad("layer_types", "full_attention for every layer: others are not supported")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    default_head_dim = 128 if architecture == "qwen3" else hidden // heads
    bias = bool(raw.get("attention_bias", False))
    config = LlamaConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.optional_count("num_key_value_heads", 1) or heads,
        head_dim=fields.optional_count("head_dim", 1) or default_head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        max_position=fields.count("max_position_embeddings"),
        rope=read_rope(fields, ("default", "linear", "llama3"), 10000.0),
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias and architecture != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=fields.optional_count("bos_token_id", 0),
        eos_token_ids=eos_token_ids,
    )
    return _checked(config, fields)


def config_from_gguf(file: GGUFFile) -> LlamaConfig:
    """The config out of GGUF metadata. Raises ModelError."""
    name = file.get("general.architecture")
    if name not in _ARCHITECTURES.values():
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported; supported: {', '.join(_ARCHITECTURES.values())}"
        )
    architecture: Architecture = name
    prefix = f"{architecture}."
    raw = {key.removeprefix(prefix): file.get(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118 - a method
    fields = Fields(raw, file.path, prefix)
    if raw.get("expert_count"):
        raise fields.bad("expert_count", "0: mixtures of experts in GGUF files are not supported")
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    names = set(file.names())
    scaling = raw.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise fields.bad("rope.scaling.type", "none or linear")
    embedding = file.info("token_embd.weight").shape
    config = LlamaConfig(
        architecture=architecture,
        vocab_size=embedding[0],
        hidden_size=hidden,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=fields.count("block_count"),
        num_heads=heads,
        num_kv_heads=fields.optional_count("attention.head_count_kv", 1) or heads,
        head_dim=fields.optional_count("attention.key_length", 1) or hidden // heads,
        rms_norm_eps=_short(fields.number("attention.layer_norm_rms_epsilon", 1e-6, 0.0, 1.0)),
        max_position=fields.count("context_length"),
        rope=RopeConfig(
            theta=_short(fields.number("rope.freq_base", 10000.0, 1.0, 1e12)),
            kind="linear" if scaling == "linear" else "default",
            factor=fields.number("rope.scaling.factor", 1.0, 1.0, 1e6) if scaling == "linear" else 1.0,
        ),
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        tie_embeddings="output.weight" not in names,
        bos_token_id=Fields({"bos": file.get("tokenizer.ggml.bos_token_id")}, file.path).optional_count("bos", 0),
        eos_token_ids=_gguf_end_tokens(file),
    )
    return _checked(config, fields)


def _gguf_end_tokens(file: GGUFFile) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    given = [file.get(key) for key in keys]
    return Fields({"eos": [i for i in dict.fromkeys(given) if i is not None]}, file.path).token_ids("eos")


def _architecture(raw: Mapping[str, Any], fields: Fields) -> Architecture:
    listed = raw.get("architectures")
    for name in listed if isinstance(listed, list) else ():
        if isinstance(name, str) and name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    kind = raw.get("model_type")
    raise ModelError(
        f"{fields.where}: {'' if kind is None else f'model_type {kind!r}, '}architecture {listed!r} is not supported; "
        f"supported: {', '.join((*_ARCHITECTURES, *DSA_CLASSES))}"
    )


def _checked(config: LlamaConfig, fields: Fields) -> LlamaConfig:
    def refuse(what: str) -> ModelError:
        return ModelError(f"{fields.where}: {what}")

    if config.num_heads % config.num_kv_heads:
        raise refuse(f"{config.num_heads} query heads can't share {config.num_kv_heads} key/value heads evenly")
    if config.head_dim % 2 or not 2 <= config.head_dim <= 1024:
        raise refuse(f"head_dim {config.head_dim}: expected an even number from 2 to 1024")
    check_tokens_and_layers(fields.where, config.vocab_size, config.num_layers, config.eos_token_ids)
    return config


def _short(value: float) -> float:
    """GGUF keeps float32: 1e-5 comes back as 9.999999747e-06."""
    return float(f"{value:.7g}")


def _generation(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}
