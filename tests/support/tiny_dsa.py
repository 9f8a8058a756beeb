"""A checkpoint folder of a model with latent attention, index keys on some layers and experts, with random weights.

Small as `tiny_checkpoint`, and slow to compute for its pages like that one; a token is a byte.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.tiny_text import END, VOCAB

LAYERS, HEADS, HIDDEN, WIDE, CONTEXT, TOPK = 5, 4, 64, 2048, 4096, 48
QUERY_RANK, RANK, ROPE, NOPE, VALUE, INDEX_HEADS, INDEX_DIM = 48, 32, 16, 16, 24, 4, 32
EXPERTS, EXPERT_WIDE, DENSE_LAYERS = 8, 32, 2
INDEXING = (0, 1, 4)

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "max_position_embeddings": CONTEXT,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM,
    "index_topk": TOPK,
    "indexer_types": ["full" if layer in INDEXING else "shared" for layer in range(LAYERS)],
    "first_k_dense_replace": DENSE_LAYERS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_WIDE,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "eos_token_id": END,
    "torch_dtype": "float32",
}


def write_dsa_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors into `folder`, which is made; returns it."""
    rng = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng) * scale * columns**-0.5

    def mlp(head: str, wide: int) -> dict[str, torch.Tensor]:
        return {
            head + "gate_proj.weight": draw(wide, HIDDEN),
            head + "up_proj.weight": draw(wide, HIDDEN),
            head + "down_proj.weight": draw(HIDDEN, wide),
        }

    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN, 3.0),
    }
    for layer in range(LAYERS):
        head = f"model.layers.{layer}."
        attention = head + "self_attn."
        tensors |= {
            head + "input_layernorm.weight": torch.ones(HIDDEN),
            head + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            attention + "q_a_proj.weight": draw(QUERY_RANK, HIDDEN),
            attention + "q_a_layernorm.weight": torch.ones(QUERY_RANK),
            # wide scores and a strong output, so that a single changed token far back changes the answer
            attention + "q_b_proj.weight": draw(HEADS * (NOPE + ROPE), QUERY_RANK, 2.0),
            attention + "kv_a_proj_with_mqa.weight": draw(RANK + ROPE, HIDDEN, 2.0),
            attention + "kv_a_layernorm.weight": torch.ones(RANK),
            attention + "kv_b_proj.weight": draw(HEADS * (NOPE + VALUE), RANK),
            attention + "o_proj.weight": draw(HIDDEN, HEADS * VALUE, 4.0),
        }
        if layer in INDEXING:
            indexer = attention + "indexer."
            tensors |= {
                indexer + "wq_b.weight": draw(INDEX_HEADS * INDEX_DIM, QUERY_RANK),
                indexer + "wk.weight": draw(INDEX_DIM, HIDDEN),
                indexer + "k_norm.weight": torch.ones(INDEX_DIM),
                indexer + "k_norm.bias": torch.zeros(INDEX_DIM),
                indexer + "weights_proj.weight": draw(INDEX_HEADS, HIDDEN),
            }
        if layer < DENSE_LAYERS:
            tensors |= mlp(head + "mlp.", WIDE)
            continue
        tensors |= {
            head + "mlp.gate.weight": draw(EXPERTS, HIDDEN),
            head + "mlp.gate.e_score_correction_bias": 0.1 * torch.randn(EXPERTS, generator=rng),
            **mlp(head + "mlp.shared_experts.", EXPERT_WIDE),
        }
        for expert in range(EXPERTS):
            tensors |= mlp(f"{head}mlp.experts.{expert}.", EXPERT_WIDE)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder
