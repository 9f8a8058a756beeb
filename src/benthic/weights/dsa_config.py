"""The shape of a model with latent attention (MLA), experts and, but for deepseek_v3, a lightning indexer (DSA)."""

import math
from dataclasses import dataclass
from typing import Literal

from benthic.weights.rope_config import RopeConfig

DsaArchitecture = Literal["glm_moe_dsa", "deepseek_v32", "deepseek_v3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """The lightning indexer: which `topk` positions a query attends to. Only layers marked in `layers` have one."""

    num_heads: int
    head_dim: int
    topk: int
    interleaved_rope: bool  # pairs (2i, 2i + 1); False: (i, i + half)
    layers: tuple[bool, ...]  # [num_layers]: which compute a selection; the others share that of the nearest below


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts. The shared experts are one MLP of num_shared_experts * intermediate_size columns."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    num_shared_experts: int
    num_groups: int
    topk_groups: int
    norm_topk: bool
    routed_scaling: float
    layers: tuple[bool, ...]  # [num_layers]: which have experts; the others the dense MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class DsaConfig:
    """A decoder with latent attention. Without an indexer (deepseek_v3) attention is dense."""

    architecture: DsaArchitecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    max_position: int  # tokens
    rope: RopeConfig
    indexer: IndexerConfig | None
    moe: MoEConfig
    num_mtp_layers: int  # 0 or 1: layer num_layers of the file, with its own indexer and experts
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax: from the un-absorbed key's size, with YaRN's part."""
        return self.rope.softmax_gain / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)
