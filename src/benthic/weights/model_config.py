"""A model's shape and rope as one frozen value, from config.json or a GGUF file's metadata. Loads no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benthic.common.errors import ModelError
from benthic.weights.gguf import GGUFFile
from benthic.weights.locate import Source

Architecture = Literal["llama", "qwen2", "qwen3"]
_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_HUGE = 1 << 24  # no size of a config is larger: a vocabulary has less than 2**24 entries
_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, half-split order. The llama3 fields count only there."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


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


def read_config(source: Source) -> LlamaConfig:
    """The model's config. Raises ModelError for an unknown architecture, or a missing or absurd field."""
    if source.kind == "gguf":
        return config_from_gguf(GGUFFile(source.path))
    return config_from_hf(_read_json(source.path / "config.json"), source.path, _generation(source.path))


def read_generation_defaults(source: Source) -> GenerationDefaults:
    """Defaults for requests, from generation_config.json (end tokens else from the config). Raises ModelError."""
    config = read_config(source)
    if source.kind == "gguf":
        return GenerationDefaults(eos_token_ids=config.eos_token_ids)
    given = _Fields(_generation(source.path), source.path / "generation_config.json")
    return GenerationDefaults(
        temperature=given.optional_number("temperature", 0.0, 100.0),
        top_p=given.optional_number("top_p", 0.0, 1.0),
        top_k=given.optional_count("top_k", 0),
        min_p=given.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=given.optional_number("repetition_penalty", 1e-3, 1e3),
        eos_token_ids=config.eos_token_ids,
    )


def config_from_hf(raw: Mapping[str, Any], folder: Path, generation: Mapping[str, Any] | None = None) -> LlamaConfig:
    """The config out of a parsed config.json; `generation` (generation_config.json) has the last word on end tokens."""
    fields = _Fields(raw, folder / "config.json")
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
        rope=_rope(raw, fields),
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias and architecture != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=fields.optional_count("bos_token_id", 0),
        eos_token_ids=_Fields({**raw, **_given(generation, "eos_token_id")}, fields.where).token_ids("eos_token_id"),
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
    fields = _Fields(raw, file.path, prefix)
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
        bos_token_id=_Fields({"bos": file.get("tokenizer.ggml.bos_token_id")}, file.path).optional_count("bos", 0),
        eos_token_ids=_gguf_end_tokens(file),
    )
    return _checked(config, fields)


def _gguf_end_tokens(file: GGUFFile) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    given = [file.get(key) for key in keys]
    return _Fields({"eos": [i for i in dict.fromkeys(given) if i is not None]}, file.path).token_ids("eos")


class _Fields:
    """Typed access to a table; a wrong type or size raises ModelError with field, value and what was expected."""

    def __init__(self, raw: Mapping[str, Any], where: Path, prefix: str = "") -> None:
        self.raw, self.where, self._prefix = raw, where, prefix

    def bad(self, key: str, expected: str) -> ModelError:
        found = repr(self.raw[key])[:100] if key in self.raw else "nothing"
        return ModelError(f"{self.where}: {self._prefix}{key}: expected {expected}, found {found}")

    def count(self, key: str) -> int:
        value = self.optional_count(key, 1)
        if value is None:
            raise self.bad(key, f"a whole number from 1 to {_HUGE}")
        return value

    def optional_count(self, key: str, least: int) -> int | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _HUGE:
            raise self.bad(key, f"a whole number from {least} to {_HUGE}")
        return value

    def number(self, key: str, default: float, least: float, most: float) -> float:
        value = self.optional_number(key, least, most)
        return default if value is None else value

    def optional_number(self, key: str, least: float, most: float) -> float | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.bad(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _HUGE for i in ids):
            raise self.bad(key, "a token id or a list of them")
        return tuple(ids)


def _architecture(raw: Mapping[str, Any], fields: _Fields) -> Architecture:
    listed = raw.get("architectures")
    for name in listed if isinstance(listed, list) else ():
        if isinstance(name, str) and name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    raise ModelError(
        f"{fields.where}: architecture {listed!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
    )


def _rope(raw: Mapping[str, Any], fields: _Fields) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.bad("rope_parameters" if raw.get("rope_parameters") else "rope_scaling", "a table")
    given = _Fields({**_given(raw, "rope_theta"), **scaling}, fields.where, "rope: ")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPES:
        raise ModelError(f"{fields.where}: rope type {kind!r} is not supported; supported: {', '.join(_ROPES)}")
    for partial in (raw.get("partial_rotary_factor"), scaling.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise ModelError(f"{fields.where}: partial_rotary_factor: expected 1, found {partial!r}")
    theta = given.number("rope_theta", 10000.0, 1.0, 1e12)
    if kind == "default":
        return RopeConfig(theta=theta)
    if given.raw.get("factor") is None:
        raise given.bad("factor", f"a number, which rope type {kind} needs")
    factor = given.number("factor", 1.0, 1.0, 1e6)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    low, high = given.number("low_freq_factor", 1.0, 1e-3, 1e6), given.number("high_freq_factor", 4.0, 1e-3, 1e6)
    if high <= low:
        raise given.bad("high_freq_factor", f"more than low_freq_factor, {low}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=given.count("original_max_position_embeddings"),
    )


def _checked(config: LlamaConfig, fields: _Fields) -> LlamaConfig:
    def refuse(what: str) -> ModelError:
        return ModelError(f"{fields.where}: {what}")

    if config.num_heads % config.num_kv_heads:
        raise refuse(f"{config.num_heads} query heads can't share {config.num_kv_heads} key/value heads evenly")
    if config.head_dim % 2 or not 2 <= config.head_dim <= 1024:
        raise refuse(f"head_dim {config.head_dim}: expected an even number from 2 to 1024")
    if config.num_layers > 4096:
        raise refuse(f"{config.num_layers} layers: expected 4096 at most")
    outside = [i for i in config.eos_token_ids if i >= config.vocab_size]
    if outside:
        raise refuse(f"end token {outside[0]}: expected an id below the vocabulary's size, {config.vocab_size}")
    return config


def _short(value: float) -> float:
    """GGUF keeps float32: 1e-5 comes back as 9.999999747e-06."""
    return float(f"{value:.7g}")


def _given(raw: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    return {key: raw[key]} if raw and raw.get(key) is not None else {}


def _generation(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: expected a table, found {type(parsed).__name__}")
    return parsed
