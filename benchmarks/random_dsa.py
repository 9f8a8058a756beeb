"""Random checkpoints of DSA models: a config.json's shape, weights drawn on the device. See `engine.RandomReader`."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import RandomReader
from benthic.models.registry import Checkpoint
from benthic.weights.dsa_config import DsaConfig
from benthic.weights.model_config import config_from_hf

DATA = Path(__file__).with_name("data")
SHARED = {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # as in GLM-5.2: most layers share a selection

Shapes = dict[str, tuple[int, ...]]


def read_raw(path: Path, shared: bool) -> dict[str, Any]:
    """A config.json without its draft layer; `shared`: with selections shared between layers."""
    raw: dict[str, Any] = json.loads(path.read_text())
    raw["num_nextn_predict_layers"] = 0
    return raw | (SHARED if shared else {})


def random_dsa(raw: dict[str, Any], device: torch.device) -> Checkpoint:
    """A checkpoint of that shape. Raises ModelError for a config that is none of a DSA model."""
    config = config_from_hf(raw, Path("random"))
    if not isinstance(config, DsaConfig):
        raise SystemExit(f"not a DSA model: {raw.get('model_type')}")
    return Checkpoint(config, RandomReader(dsa_shapes(config), device))


def dsa_shapes(config: DsaConfig) -> Shapes:
    """The tensors of a checkpoint, experts one by one as files have them."""
    c = config
    shapes: Shapes = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
        "lm_head.weight": (c.vocab_size, c.hidden_size),
    }
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (c.hidden_size,),
            p + "post_attention_layernorm.weight": (c.hidden_size,),
        }
        shapes |= _attention(c, p + "self_attn.")
        if c.indexer is not None and c.indexer.layers[i]:
            shapes |= _indexer(c, p + "self_attn.indexer.")
        shapes |= _experts(c, p + "mlp.") if c.moe.layers[i] else _mlp(c.hidden_size, c.intermediate_size, p + "mlp.")
    return shapes


def _attention(c: DsaConfig, p: str) -> Shapes:
    return {
        p + "q_a_proj.weight": (c.q_lora_rank, c.hidden_size),
        p + "q_a_layernorm.weight": (c.q_lora_rank,),
        p + "q_b_proj.weight": (c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
        p + "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        p + "kv_a_layernorm.weight": (c.kv_lora_rank,),
        p + "kv_b_proj.weight": (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        p + "o_proj.weight": (c.hidden_size, c.num_heads * c.v_head_dim),
    }


def _indexer(c: DsaConfig, p: str) -> Shapes:
    assert c.indexer is not None
    heads, size = c.indexer.num_heads, c.indexer.head_dim
    return {
        p + "wq_b.weight": (heads * size, c.q_lora_rank),
        p + "wk.weight": (size, c.hidden_size),
        p + "k_norm.weight": (size,),
        p + "k_norm.bias": (size,),
        p + "weights_proj.weight": (heads, c.hidden_size),
    }


def _experts(c: DsaConfig, p: str) -> Shapes:
    wide = c.moe.intermediate_size
    shapes: Shapes = {
        p + "gate.weight": (c.moe.num_experts, c.hidden_size),
        p + "gate.e_score_correction_bias": (c.moe.num_experts,),
    }
    for expert in range(c.moe.num_experts):
        shapes |= _mlp(c.hidden_size, wide, f"{p}experts.{expert}.")
    if c.moe.num_shared_experts:
        shapes |= _mlp(c.hidden_size, wide * c.moe.num_shared_experts, p + "shared_experts.")
    return shapes


def _mlp(hidden: int, wide: int, p: str) -> Shapes:
    return {
        p + "gate_proj.weight": (wide, hidden),
        p + "up_proj.weight": (wide, hidden),
        p + "down_proj.weight": (hidden, wide),
    }
