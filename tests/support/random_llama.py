"""Small Llama-style checkpoints with random weights: any of the architectures, as safetensors or as GGUF."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benthic.models.llama_gguf import gguf_name
from tests.support.gguf_files import write_tensors

VOCAB, LAYERS, HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM = 97, 3, 64, 96, 8, 4, 16
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_llama(folder: Path, architecture: str = "llama", **fields: Any) -> Path:
    """config.json and model.safetensors in `folder`, which is made; `fields` of the config replace others."""
    config = {
        "architectures": [CLASSES[architecture]],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 1000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    } | fields
    biases = bool(config.get("attention_bias"))
    tensors = random_tensors(
        qkv_bias=biases or architecture == "qwen2",
        output_bias=biases,
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=architecture == "qwen3",
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_llama_gguf(path: Path, kind: str = "Q8_0") -> Path:
    """A Llama whose matrices are quantised as `kind`. The rows of q and k are random, so no matter in which order."""
    stored = {
        gguf_name(name): (tensor.numpy(), kind if tensor.ndim == 2 else "F32")
        for name, tensor in random_tensors().items()
    }
    metadata = {
        "llama.embedding_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.feed_forward_length": WIDE,
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.rope.freq_base": 1000.0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return write_tensors(path, stored, metadata)


def random_tensors(
    *, qkv_bias: bool = False, output_bias: bool = False, mlp_bias: bool = False, qk_norm: bool = False
) -> dict[str, torch.Tensor]:
    """float32, by Hugging Face names; norms and biases that do something."""
    rng = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size, generator=rng) + 0.5

    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN) * HIDDEN**0.5,
        "model.norm.weight": norm(HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN),
    }
    rows, shared = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (rows, HIDDEN, qkv_bias),
        "self_attn.k_proj": (shared, HIDDEN, qkv_bias),
        "self_attn.v_proj": (shared, HIDDEN, qkv_bias),
        "self_attn.o_proj": (HIDDEN, rows, output_bias),
        "mlp.gate_proj": (WIDE, HIDDEN, mlp_bias),
        "mlp.up_proj": (WIDE, HIDDEN, mlp_bias),
        "mlp.down_proj": (HIDDEN, WIDE, mlp_bias),
    }
    for layer in range(LAYERS):
        head = f"model.layers.{layer}."
        tensors[head + "input_layernorm.weight"] = norm(HIDDEN)
        tensors[head + "post_attention_layernorm.weight"] = norm(HIDDEN)
        for name, (out, size, has_bias) in shapes.items():
            tensors[f"{head}{name}.weight"] = draw(out, size)
            if has_bias:
                tensors[f"{head}{name}.bias"] = draw(out) * out**0.5
        if qk_norm:
            tensors |= {f"{head}self_attn.{name}.weight": norm(HEAD_DIM) for name in ("q_norm", "k_norm")}
    return tensors
