"""Names and shapes of the tensors of GLM-5 and DeepSeek checkpoints, and what to make of those that are not used."""

import logging
from collections.abc import Iterable

from benthic.common.errors import ModelError
from benthic.weights.checkpoint import total_bytes
from benthic.weights.dsa_config import DsaConfig
from benthic.weights.interface import TensorReader

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]
_SHOWN = 3  # names in a message


def model_shapes(config: DsaConfig, experts: range | None = None) -> Shapes:
    """Every tensor of the decoder, its layers' included; of the routed experts only `experts`, where given."""
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        indexes = config.indexer is not None and config.indexer.layers[layer]
        shapes |= layer_shapes(config, layer, indexes=indexes, has_experts=config.moe.layers[layer], experts=experts)
    return shapes


def mtp_shapes(config: DsaConfig) -> Shapes:
    """Every tensor of the multi-token prediction layer behind the decoder's."""
    hidden, layer = config.hidden_size, config.num_layers
    shapes = layer_shapes(config, layer, indexes=config.indexer is not None, has_experts=True)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"model.layers.{layer}.{name}.weight"] = (hidden,)
    shapes[f"model.layers.{layer}.eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes


def layer_shapes(
    config: DsaConfig, layer: int, *, indexes: bool, has_experts: bool, experts: range | None = None
) -> Shapes:
    """Every tensor of one decoder layer; of its routed experts only `experts`, where given."""
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    shapes: Shapes = {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= _attention(config, prefix + "self_attn.")
    if indexes:
        shapes |= _indexer(config, prefix + "self_attn.indexer.")
    return shapes | (
        _moe(config, prefix + "mlp.", range(config.moe.num_experts) if experts is None else experts)
        if has_experts
        else _mlp(prefix + "mlp.", hidden, config.intermediate_size)
    )


def report_leftovers(config: DsaConfig, reader: TensorReader) -> None:
    """Say in the log which tensors of the file nobody uses. Raises ModelError for an MTP tensor of the wrong shape."""
    used = model_shapes(config).keys()
    rest = [name for name in reader.names() if name not in used and not name.endswith("rotary_emb.inv_freq")]
    mtp = f"model.layers.{config.num_layers}."
    copies = (f"{mtp}embed_tokens.weight", f"{mtp}shared_head.head.weight")
    tied = ("lm_head.weight",) if config.tie_embeddings else ()
    ignored = [name for name in rest if name in copies or name in tied or _is_shared_indexer(config, name)]
    kept = [name for name in rest if name.startswith(mtp) and name not in copies]
    other = set(rest) - set(ignored) - set(kept)
    if ignored:
        logger.info("ignored: %d tensors that copy others or that no layer reads: %s", len(ignored), _some(ignored))
    if config.num_mtp_layers:
        _check_mtp(config, reader)
    if kept:
        size = total_bytes(reader, kept) / (1 << 20)
        logger.info("kept for speculative decoding: %d tensors, %.0f MiB, not loaded", len(kept), size)
    if other:
        logger.warning("%d tensors of the checkpoint are unknown and not used: %s", len(other), _some(sorted(other)))


def _check_mtp(config: DsaConfig, reader: TensorReader) -> None:
    names, expected = set(reader.names()), mtp_shapes(config)
    missing = [name for name in expected if name not in names]
    if missing:
        logger.info(
            "layer %d, for speculative decoding, lacks %d of its %d tensors: %s",
            config.num_layers, len(missing), len(expected), _some(missing),
        )  # fmt: skip
    for name, shape in expected.items():
        if name in names and reader.info(name).shape != shape:
            raise ModelError(
                f"{reader.files[0].parent}: tensor {name!r} has shape {list(reader.info(name).shape)}, "
                f"the config wants {list(shape)}"
            )


def _attention(c: DsaConfig, prefix: str) -> Shapes:
    heads, nope, rope, value = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    return {
        f"{prefix}q_a_proj.weight": (c.q_lora_rank, c.hidden_size),
        f"{prefix}q_a_layernorm.weight": (c.q_lora_rank,),
        f"{prefix}q_b_proj.weight": (heads * (nope + rope), c.q_lora_rank),
        f"{prefix}kv_a_proj_with_mqa.weight": (c.kv_lora_rank + rope, c.hidden_size),
        f"{prefix}kv_a_layernorm.weight": (c.kv_lora_rank,),
        f"{prefix}kv_b_proj.weight": (heads * (nope + value), c.kv_lora_rank),
        f"{prefix}o_proj.weight": (c.hidden_size, heads * value),
    }


def _indexer(c: DsaConfig, prefix: str) -> Shapes:
    assert c.indexer is not None
    heads, size = c.indexer.num_heads, c.indexer.head_dim
    return {
        f"{prefix}wq_b.weight": (heads * size, c.q_lora_rank),
        f"{prefix}wk.weight": (size, c.hidden_size),
        f"{prefix}k_norm.weight": (size,),
        f"{prefix}k_norm.bias": (size,),
        f"{prefix}weights_proj.weight": (heads, c.hidden_size),
    }


def _moe(c: DsaConfig, prefix: str, experts: range) -> Shapes:
    moe, hidden = c.moe, c.hidden_size
    shapes: Shapes = {
        f"{prefix}gate.weight": (moe.num_experts, hidden),
        f"{prefix}gate.e_score_correction_bias": (moe.num_experts,),
    }
    for expert in experts:
        shapes |= _mlp(f"{prefix}experts.{expert}.", hidden, moe.intermediate_size)
    if moe.num_shared_experts:
        shapes |= _mlp(f"{prefix}shared_experts.", hidden, moe.intermediate_size * moe.num_shared_experts)
    return shapes


def _mlp(prefix: str, hidden: int, wide: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (wide, hidden),
        f"{prefix}up_proj.weight": (wide, hidden),
        f"{prefix}down_proj.weight": (hidden, wide),
    }


def _is_shared_indexer(config: DsaConfig, name: str) -> bool:
    """Whether it is the indexer's, of a layer of the decoder that has none (some re-exported files carry them)."""
    parts = name.split(".")
    return (
        parts[:2] == ["model", "layers"]
        and parts[3:5] == ["self_attn", "indexer"]
        and parts[2].isdecimal()
        and int(parts[2]) < config.num_layers
    )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (", …" if len(listed) > _SHOWN else "")
