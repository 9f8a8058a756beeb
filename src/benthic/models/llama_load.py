"""Builds a LlamaModel from the tensors of a checkpoint: fuses, converts and moves them one layer after another."""

from collections.abc import Callable
from typing import Literal

import torch

from benthic.layers.linear import Linear
from benthic.layers.linear_sum import LinearSum
from benthic.layers.mlp import GatedMLP
from benthic.layers.norm import RMSNorm
from benthic.layers.rope import Rope, default_frequencies, llama3_frequencies
from benthic.models.llama import LlamaLayer, LlamaModel
from benthic.models.llama_gguf import ROPE_FACTORS
from benthic.models.rank_shape import local_shape, tensor_share
from benthic.parallel.collectives import Collectives
from benthic.parallel.layout import SINGLE, ParallelLayout
from benthic.weights.checkpoint import take, total_bytes
from benthic.weights.interface import TensorReader
from benthic.weights.model_config import LlamaConfig

Cut = Literal["whole", "rows", "columns"]  # what of a matrix a rank of tensor parallelism holds
Progress = Callable[[int, int], None]  # (stored bytes read so far, stored bytes in all)
_TIED = ("lm_head.weight",)


def load_llama(
    config: LlamaConfig,
    reader: TensorReader,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    layout: ParallelLayout = SINGLE,
    group: Collectives | None = None,
) -> LlamaModel:
    """The model on `device`, this rank's part of it. Raises ModelError for a missing tensor or a wrong shape.

    Raises ConfigError where the heads or the MLP's columns can't be cut into `layout.tp_size` parts.
    """
    assert layout.tp_size == 1 or (group is not None and group.size == layout.tp_size)
    return _Loader(config, reader, device, dtype, progress, layout, group).model()


class _Loader:
    """Owns the count of bytes read."""

    def __init__(
        self,
        config: LlamaConfig,
        reader: TensorReader,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
        layout: ParallelLayout,
        group: Collectives | None,
    ) -> None:
        self._config = config
        self._reader = reader
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._layout = layout
        self._group = group if layout.tp_size > 1 else None
        self._done = 0
        self._total = total_bytes(reader, (n for n in reader.names() if not (config.tie_embeddings and n in _TIED)))

    def model(self) -> LlamaModel:
        config, hidden = self._config, self._config.hidden_size
        own = local_shape(config, self._layout)
        assert isinstance(own, LlamaConfig)
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, hidden)
        layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        norm = self._norm("model.norm", hidden)
        tied = config.tie_embeddings
        head = embedding if tied else self._tensor("lm_head.weight", config.vocab_size, hidden)
        rope = Rope(self._frequencies().to(self._device), config.max_position)
        self._progress(self._total, self._total)
        return LlamaModel(own, embedding, layers, norm, Linear(head), rope)

    def _layer(self, prefix: str) -> LlamaLayer:
        c = self._config
        hidden, wide, rows, shared = (
            c.hidden_size,
            c.intermediate_size,
            c.num_heads * c.head_dim,
            c.num_kv_heads * c.head_dim,
        )
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [(f"{attn}q_proj", rows), (f"{attn}k_proj", shared), (f"{attn}v_proj", shared)]
        return LlamaLayer(
            attention_norm=self._norm(prefix + "input_layernorm", hidden),
            qkv=self._linear(qkv, hidden, c.qkv_bias, "rows"),
            q_norm=self._norm(f"{attn}q_norm", c.head_dim) if c.qk_norm else None,
            k_norm=self._norm(f"{attn}k_norm", c.head_dim) if c.qk_norm else None,
            output=self._summed(f"{attn}o_proj", hidden, rows, c.output_bias),
            mlp_norm=self._norm(prefix + "post_attention_layernorm", hidden),
            mlp=GatedMLP(
                self._linear([(f"{mlp}gate_proj", wide), (f"{mlp}up_proj", wide)], hidden, c.mlp_bias, "rows"),
                self._summed(f"{mlp}down_proj", hidden, wide, c.mlp_bias),
            ),
        )

    def _linear(self, parts: list[tuple[str, int]], size: int, has_bias: bool, cut: Cut) -> Linear:
        """One product out of several with the same input: their rows (this rank's) one after another."""
        weight = self._cat([self._tensor(f"{name}.weight", rows, size, cut=cut) for name, rows in parts])
        bias = self._cat([self._tensor(f"{name}.bias", rows, cut=cut) for name, rows in parts]) if has_bias else None
        return Linear(weight, bias)

    def _summed(self, name: str, rows: int, size: int, has_bias: bool) -> Linear | LinearSum:
        """A product over this rank's columns, to be summed over the ranks; the first of them adds the bias."""
        weight = self._tensor(f"{name}.weight", rows, size, cut="columns")
        bias = self._tensor(f"{name}.bias", rows) if has_bias else None
        if self._group is None:
            return Linear(weight, bias)
        return LinearSum(Linear(weight, bias if self._layout.tp_rank == 0 else None), self._group)

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._tensor(f"{name}.weight", size), self._config.rms_norm_eps)

    def _tensor(self, name: str, *shape: int, cut: Cut = "whole") -> torch.Tensor:
        """The tensor of the checkpoint, of `shape` there, or what this rank holds of it; only that is copied."""
        stored = take(self._reader, name, shape)
        if cut != "whole":
            dim = 0 if cut == "rows" else 1
            stored = stored.narrow(dim, *tensor_share(shape[dim], self._layout))
        # a copy even where nothing changes: the model must not depend on the mapped file
        tensor = stored.to(device=self._device, dtype=self._dtype, copy=True, memory_format=torch.contiguous_format)
        self._done += self._reader.info(name).num_bytes
        self._progress(self._done, self._total)
        return tensor

    @staticmethod
    def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _frequencies(self) -> torch.Tensor:
        rope, head_dim = self._config.rope, self._config.head_dim
        frequencies = default_frequencies(rope.theta, head_dim)
        if ROPE_FACTORS in self._reader.names():
            return frequencies / take(self._reader, ROPE_FACTORS, (head_dim // 2,)).float()
        if rope.kind == "linear":
            return frequencies / rope.factor
        if rope.kind == "llama3":
            return llama3_frequencies(
                frequencies, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
            )
        return frequencies
