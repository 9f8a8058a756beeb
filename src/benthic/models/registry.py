"""From a located checkpoint to a model that runs."""

import dataclasses
import json
import logging
from dataclasses import dataclass
from typing import Any

import torch

from benthic.models.deepseek import DeepseekModel
from benthic.models.deepseek_load import load_deepseek
from benthic.models.kv_layout import KVFormats, kv_payloads
from benthic.models.llama import LlamaModel
from benthic.models.llama_gguf import LlamaGGUFReader
from benthic.models.llama_load import Progress, load_llama
from benthic.parallel.collectives import Collectives
from benthic.parallel.layout import SINGLE, ParallelLayout
from benthic.quantization import DequantisingReader
from benthic.weights.checkpoint import SafetensorsReader
from benthic.weights.dequantise import GGUFReader
from benthic.weights.identity import namespace, weights_identity
from benthic.weights.interface import TensorReader
from benthic.weights.locate import Source
from benthic.weights.model_config import LlamaConfig, ModelShape, config_from_gguf, read_config

_LLAMA_ROPE = ("theta", "kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_position")
"""What Llama's namespaces have always held of the rope: with more fields, no older disk floor would be found again."""

Model = LlamaModel | DeepseekModel


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: config read, files mapped, nothing loaded."""

    config: ModelShape
    reader: TensorReader


def open_checkpoint(source: Source) -> Checkpoint:
    """Config and tensors of `source`. Raises ModelError."""
    if source.kind == "gguf":
        file = GGUFReader(source.path)
        config = config_from_gguf(file)
        return Checkpoint(config, LlamaGGUFReader(file, config))
    shape, reader = read_config(source), DequantisingReader(SafetensorsReader(source.path))
    if modules := reader.summary().get("F8_E4M3"):
        counts = ", ".join(f"{module} ({count})" for module, count in modules.items())
        logger.info("fp8 weights, dequantised on loading: %s", counts)
    return Checkpoint(shape, reader)


def load_model(
    source: Source | Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    layout: ParallelLayout = SINGLE,
    group: Collectives | None = None,
) -> Model:
    """This rank's part of the model on `device` in `dtype`; `progress` gets (bytes read, bytes in all).

    `group`: the forward's exchanges between all ranks, None where there is one. Raises ModelError, and ConfigError
    where the model can't be cut as `layout` says (`rank_shape.local_shape`).
    """
    checkpoint = open_checkpoint(source) if isinstance(source, Source) else source
    config, reader = checkpoint.config, checkpoint.reader
    if isinstance(config, LlamaConfig):
        return load_llama(config, reader, device, dtype, progress or _silent, layout, group)
    return load_deepseek(config, reader, device, dtype, progress or _silent, layout, group)


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """What makes KV bytes interchangeable: the digest, and in words what went into it."""

    digest: bytes  # 32 bytes
    words: dict[str, str]


def model_namespace(
    checkpoint: Checkpoint, formats: KVFormats, page_size: int, layout: ParallelLayout = SINGLE
) -> Namespace:
    """The namespace of the KV that this rank keeps (see `weights.identity`). Reads files below 1 GiB whole.

    Tensor parallelism gives each rank one of its own, for its heads. Context parallelism does not: its pages are whole.
    """
    config = checkpoint.config
    described: dict[str, Any] = dataclasses.asdict(config)
    rope = described.pop("rope")
    # these do not change a single KV byte
    for name in ("bos_token_id", "eos_token_ids", "max_position", "num_mtp_layers"):
        described.pop(name, None)
    if isinstance(config, LlamaConfig):
        rope = {**{name: rope[name] for name in _LLAMA_ROPE}, "order": "half-split"}
    else:
        rope["order"] = "interleaved"
        if config.indexer is not None:
            rope["index_order"] = "interleaved" if config.indexer.interleaved_rope else "half-split"
            described["index_transform"] = "none"  # others turn index keys by a Hadamard matrix first
    parts: dict[str, Any] = {
        "weights": weights_identity(checkpoint.reader),
        "model": described,
        "rope": rope,
        "weights_dtype": str(formats.dtype).removeprefix("torch."),
        "kv_dtype": formats.words(config),
        "page_size": page_size,
        "payloads": tuple(payload.name for payload in kv_payloads(config, page_size, formats)),
    }
    if layout.tp_size > 1:
        parts["tensor_parallel"] = f"{layout.tp_size}/{layout.tp_rank}"
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in parts.items()}
    return Namespace(namespace(**parts), words)


def _silent(done: int, total: int) -> None:
    """Nobody watches."""
