"""Small shapes of models with latent attention, to be changed field by field."""

import dataclasses
from typing import Any

from benthic.weights.dsa_config import DsaConfig, IndexerConfig, MoEConfig
from benthic.weights.model_config import LlamaConfig
from benthic.weights.rope_config import RopeConfig

INDEXER = IndexerConfig(
    num_heads=4, head_dim=32, topk=24, interleaved_rope=True, layers=(True, True, False, False, True)
)
_MOE = MoEConfig(
    num_experts=8, num_experts_per_token=2, intermediate_size=32, num_shared_experts=1, num_groups=1, topk_groups=1,
    norm_topk=True, routed_scaling=2.5, layers=(False, True, True, True, True),
)  # fmt: skip
_DSA = DsaConfig(
    architecture="glm_moe_dsa", vocab_size=320, hidden_size=64, intermediate_size=96, num_layers=5, num_heads=4,
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, rms_norm_eps=1e-5,
    max_position=512, rope=RopeConfig(theta=10000.0), indexer=INDEXER, moe=_MOE, num_mtp_layers=0,
    tie_embeddings=False, bos_token_id=None, eos_token_ids=(1,),
)  # fmt: skip
LLAMA = LlamaConfig(
    architecture="llama", vocab_size=320, hidden_size=96, intermediate_size=160, num_layers=3, num_heads=6,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, max_position=512, rope=RopeConfig(theta=10000.0), qkv_bias=False,
    output_bias=False, mlp_bias=False, qk_norm=False, tie_embeddings=True, bos_token_id=None, eos_token_ids=(1,),
)  # fmt: skip


def dsa_config(**changes: Any) -> DsaConfig:
    """A model of five layers of which 0, 1 and 4 index, with some fields changed."""
    return dataclasses.replace(_DSA, **changes)
