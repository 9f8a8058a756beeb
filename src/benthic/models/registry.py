"""From a located checkpoint to a model that runs."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from benthic.models.llama import LlamaModel
from benthic.models.llama_gguf import LlamaGGUFReader
from benthic.models.llama_load import Progress, load_llama
from benthic.weights.checkpoint import SafetensorsReader
from benthic.weights.dequantise import GGUFReader
from benthic.weights.identity import namespace, weights_identity
from benthic.weights.interface import TensorReader
from benthic.weights.locate import Source
from benthic.weights.model_config import LlamaConfig, config_from_gguf, read_config


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: config read, files mapped, nothing loaded."""

    config: LlamaConfig
    reader: TensorReader


def open_checkpoint(source: Source) -> Checkpoint:
    """Config and tensors of `source`. Raises ModelError."""
    if source.kind == "gguf":
        file = GGUFReader(source.path)
        config = config_from_gguf(file)
        return Checkpoint(config, LlamaGGUFReader(file, config))
    return Checkpoint(read_config(source), SafetensorsReader(source.path))


def load_model(
    source: Source | Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> LlamaModel:
    """The model on `device` in `dtype`; `progress` gets (bytes read, bytes in all). Raises ModelError."""
    checkpoint = open_checkpoint(source) if isinstance(source, Source) else source
    return load_llama(checkpoint.config, checkpoint.reader, device, dtype, progress or _silent)


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """What makes KV bytes interchangeable: the digest, and in words what went into it."""

    digest: bytes  # 32 bytes
    words: dict[str, str]


def model_namespace(
    checkpoint: Checkpoint, *, weights_dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int
) -> Namespace:
    """The namespace of the KV that this model makes (see `weights.identity`). Reads files below 1 GiB whole."""
    described: dict[str, Any] = dataclasses.asdict(checkpoint.config)
    rope = described.pop("rope")
    for name in ("bos_token_id", "eos_token_ids", "max_position"):  # these do not change a single KV byte
        described.pop(name)
    parts: dict[str, Any] = {
        "weights": weights_identity(checkpoint.reader),
        "model": described,
        "rope": {**rope, "order": "half-split"},
        "weights_dtype": str(weights_dtype).removeprefix("torch."),
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "page_size": page_size,
        "payloads": ("target_kv",),
    }
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in parts.items()}
    return Namespace(namespace(**parts), words)


def _silent(done: int, total: int) -> None:
    """Nobody watches."""
