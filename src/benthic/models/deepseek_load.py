"""Builds a DeepseekModel from the tensors of a checkpoint: fuses, stacks, converts and moves them layer by layer."""

import torch

from benthic.attention.latent import IndexNorm, LayerNorms
from benthic.layers.indexer import Indexer
from benthic.layers.latent_rope import latent_rope_table
from benthic.layers.linear import Linear
from benthic.layers.mla import LatentAttention, LatentWeights
from benthic.layers.mlp import GatedMLP
from benthic.layers.moe import ExpertShare, MoE
from benthic.layers.norm import RMSNorm
from benthic.models.deepseek import DeepseekLayer, DeepseekModel
from benthic.models.deepseek_tensors import model_shapes, report_leftovers
from benthic.models.llama_load import Progress
from benthic.models.rank_shape import local_experts, local_shape
from benthic.parallel.collectives import Collectives
from benthic.parallel.layout import SINGLE, ParallelLayout
from benthic.weights.checkpoint import take, total_bytes
from benthic.weights.dsa_config import DsaConfig
from benthic.weights.interface import TensorReader


def load_deepseek(
    config: DsaConfig,
    reader: TensorReader,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    layout: ParallelLayout = SINGLE,
    group: Collectives | None = None,
) -> DeepseekModel:
    """The model on `device`; of the routed experts only this rank's are read.

    Raises ModelError for a missing tensor or a wrong shape, ConfigError for tensor parallelism and for experts that
    can't be spread over the ranks.
    """
    local_shape(config, layout)  # refuses what can't be cut
    share = None
    if layout.ep_size > 1:
        assert group is not None
        assert group.size == layout.ep_size
        share = ExpertShare(group, local_experts(config, layout).start)
    model = _Loader(config, reader, device, dtype, progress, local_experts(config, layout), share).model()
    if layout.leads:
        report_leftovers(config, reader)
    return model


class _Loader:
    """Owns the count of bytes read."""

    def __init__(
        self,
        config: DsaConfig,
        reader: TensorReader,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
        experts: range,
        share: ExpertShare | None,
    ) -> None:
        self._config = config
        self._reader = reader
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._experts = experts
        self._share = share
        self._shapes = model_shapes(config, experts)
        self._done = 0
        self._total = total_bytes(reader, self._shapes)
        self._ordinal = 0  # indexing layers made so far

    def model(self) -> DeepseekModel:
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight")
        layers = tuple(self._layer(i) for i in range(config.num_layers))
        norm = self._norm("model.norm")
        head = embedding if config.tie_embeddings else self._tensor("lm_head.weight")
        table = latent_rope_table(config.rope, config.qk_rope_head_dim, config.max_position)
        self._progress(self._total, self._total)
        return DeepseekModel(config, embedding, layers, norm, Linear(head), table.to(self._device))

    def _layer(self, index: int) -> DeepseekLayer:
        prefix = f"model.layers.{index}."
        indexes = self._config.indexer is not None and self._config.indexer.layers[index]
        return DeepseekLayer(
            attention_norm=self._norm(prefix + "input_layernorm"),
            attention=self._attention(prefix + "self_attn.", indexes),
            mlp_norm=self._norm(prefix + "post_attention_layernorm"),
            mlp=self._moe(prefix + "mlp.") if self._config.moe.layers[index] else self._mlp(prefix + "mlp."),
        )

    def _attention(self, prefix: str, indexes: bool) -> LatentAttention:
        c = self._config
        inward, queries = ["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj"]
        if indexes:
            inward.append("indexer.wk")
            queries.append("indexer.wq_b")
        both = self._tensor(f"{prefix}kv_b_proj.weight").view(c.num_heads, -1, c.kv_lora_rank)
        keys, values = both[:, : c.qk_nope_head_dim], both[:, c.qk_nope_head_dim :]
        indexer = self._indexer(prefix + "indexer.") if indexes else None
        weights = LatentWeights(
            inward=self._linear(*(prefix + name for name in inward)),
            norms=LayerNorms(
                query=self._tensor(f"{prefix}q_a_layernorm.weight"),
                latent=self._tensor(f"{prefix}kv_a_layernorm.weight"),
                eps=c.rms_norm_eps,
                index=None if indexer is None else indexer.keys,
            ),
            queries=self._linear(*(prefix + name for name in queries)),
            keys=keys.contiguous(),
            values=values.transpose(1, 2).contiguous(),
            outward=self._linear(prefix + "o_proj"),
        )
        return LatentAttention(weights, c.qk_rope_head_dim, indexer)

    def _indexer(self, prefix: str) -> Indexer:
        config = self._config.indexer
        assert config is not None
        self._ordinal += 1
        keys = IndexNorm(
            ordinal=self._ordinal - 1,
            weight=self._tensor(f"{prefix}k_norm.weight", torch.float32),  # float32 in some files, and used in it
            bias=self._tensor(f"{prefix}k_norm.bias", torch.float32),
            interleaved=config.interleaved_rope,
        )
        return Indexer(keys, self._tensor(f"{prefix}weights_proj.weight"))

    def _mlp(self, prefix: str) -> GatedMLP:
        return GatedMLP(self._linear(prefix + "gate_proj", prefix + "up_proj"), self._linear(prefix + "down_proj"))

    def _moe(self, prefix: str) -> MoE:
        c = self._config.moe
        # a single shared expert is shaped like the others: on a GPU one more of them costs no launch of its own
        # (not where ranks share the experts: each would add it)
        in_stack = c.num_shared_experts == 1 and self._device.type == "cuda" and self._share is None
        experts = [f"{prefix}experts.{expert}." for expert in self._experts]
        if in_stack:
            experts.append(f"{prefix}shared_experts.")
        wide, hidden = c.intermediate_size, self._config.hidden_size
        gate_up = torch.empty((len(experts), 2 * wide, hidden), dtype=self._dtype, device=self._device)
        down = torch.empty((len(experts), hidden, wide), dtype=self._dtype, device=self._device)
        for place, name in enumerate(experts):
            gate_up[place, :wide] = self._stored(f"{name}gate_proj.weight")
            gate_up[place, wide:] = self._stored(f"{name}up_proj.weight")
            down[place] = self._stored(f"{name}down_proj.weight")
        return MoE(
            c,
            self._tensor(f"{prefix}gate.weight"),
            self._tensor(f"{prefix}gate.e_score_correction_bias", torch.float32),
            gate_up,
            down,
            None if in_stack else self._mlp(f"{prefix}shared_experts."),
            self._share,
        )

    def _linear(self, *names: str) -> Linear:
        """One product out of several with the same input: their rows one after another."""
        tensors = [self._tensor(f"{name}.weight") for name in names]
        return Linear(tensors[0] if len(tensors) == 1 else torch.cat(tensors))

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._tensor(f"{name}.weight"), self._config.rms_norm_eps)

    def _tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """On the device, in the model's dtype or another."""
        # a copy even where nothing changes: the model must not depend on the mapped file
        return self._stored(name).to(device=self._device, dtype=dtype or self._dtype, copy=True)

    def _stored(self, name: str) -> torch.Tensor:
        tensor = take(self._reader, name, self._shapes[name])
        self._done += self._reader.info(name).num_bytes
        self._progress(self._done, self._total)
        return tensor
