"""A checkpoint folder with random weights that a real server serves: small pages, and prompts slow to compute for it.

The feed-forward layers are wide for their few heads: a page takes milliseconds to compute and a fraction of one to
read, so that reading it back is worth while, as it is for real models. The answer depends on every token of the prompt.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.tiny_text import END, VOCAB

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE, CONTEXT = 4, 4, 2, 16, 64, 4096, 4096
PAGE_TOKENS = 16
FRAME_BYTES = LAYERS * 2 * PAGE_TOKENS * KV_HEADS * HEAD_DIM * 4  # float32: 16 KiB
SLOT_BYTES = FRAME_BYTES + 4096

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "eos_token_id": END,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, seed: int = 0, context: int = CONTEXT) -> Path:
    """Write config.json and model.safetensors into `folder`, which is made; returns it."""
    rng = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng) * scale * columns**-0.5

    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN, 3.0),
    }
    for layer in range(LAYERS):
        head = f"model.layers.{layer}."
        tensors |= {
            head + "input_layernorm.weight": torch.ones(HIDDEN),
            head + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            # wide scores and a strong output, so that a single changed token far back changes the answer
            head + "self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN, 2.0),
            head + "self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN, 2.0),
            head + "self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            head + "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM, 4.0),
            head + "mlp.gate_proj.weight": draw(WIDE, HIDDEN),
            head + "mlp.up_proj.weight": draw(WIDE, HIDDEN),
            head + "mlp.down_proj.weight": draw(HIDDEN, WIDE),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": context}))
    save_file(tensors, folder / "model.safetensors")
    return folder
