"""Writes small GGUF files with the `gguf` package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from benthic.weights.gguf import GGUFFile
from benthic.weights.locate import BUILT_IN, locate


def write_tensors(
    path: Path, tensors: dict[str, tuple[NDArray[Any], str]], metadata: dict[str, Any] | None = None
) -> Path:
    """Tensors float32, or uint8 rows already packed, by name, with their GGUF type."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, _value_type(value))
    for name, (values, kind) in tensors.items():
        quantised = gguf.GGMLQuantizationType[kind]
        stored = values if values.dtype == np.uint8 else gguf.quants.quantize(values, quantised)
        writer.add_tensor(name, stored, raw_dtype=quantised)
    _write(writer)
    return path


def write_vocabulary(path: Path, pre: str | None, **changes: Any) -> Path:
    """The built-in model's vocabulary, without tensors, under another pre-tokenizer."""
    file = GGUFFile(locate(BUILT_IN).path)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(changes.get("tokens", file.get("tokenizer.ggml.tokens")))
    writer.add_token_types(changes.get("types", file.get("tokenizer.ggml.token_type")))
    writer.add_token_merges(file.get("tokenizer.ggml.merges"))
    writer.add_bos_token_id(changes.get("bos", 1))
    writer.add_eos_token_id(2)
    if "add_bos" in changes:
        writer.add_add_bos_token(changes["add_bos"])
    _write(writer)
    return path


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value_type(value: Any) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
