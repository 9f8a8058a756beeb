"""What makes two engines' KV bytes interchangeable: a digest of the weights' content, and the namespace built on it.

Neither depends on where a checkpoint lies, what its files are called or how old they are.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benthic.common.units import GIB, KIB
from benthic.weights.interface import TensorReader

LAYOUT_VERSION = 1  # of the KV bytes inside a page; raise it when their order changes
_SAMPLE = 4 * KIB
_WHOLE_FILE_BELOW = GIB


def weights_identity(reader: TensorReader) -> str:
    """SHA-256 (hex) of the checkpoint's content, in two parts.

    Every tensor's name, type, shape and a hash of its first, middle and last 4 KiB; each file below 1 GiB as a whole.
    """
    tensors = [
        [info.name, info.dtype, list(info.shape), _sampled_hash(reader.raw(info.name))]
        for info in (reader.info(name) for name in sorted(reader.stored_names()))
    ]
    whole = sorted(_file_hash(path) for path in reader.files if path.stat().st_size < _WHOLE_FILE_BELOW)
    return hashlib.sha256(_canonical({"tensors": tensors, "files": whole})).hexdigest()


def namespace(
    *,
    weights: str,
    model: Mapping[str, Any],
    rope: Mapping[str, Any],
    weights_dtype: str,
    kv_dtype: str,
    page_size: int,
    payloads: Sequence[str],
    layout_version: int = LAYOUT_VERSION,
    tensor_parallel: str | None = None,
) -> bytes:
    """The 32 bytes that start every chain of content hashes: SHA-256 over a canonical JSON of all that shapes KV bytes.

    `weights` is `weights_identity`; `model` and `rope` are plain values (finite numbers, strings, lists, tables).
    `tensor_parallel`: "size/rank" of the heads that a page holds; None where it holds all, and then no part of the
    JSON, so that what one rank has written is found by later versions.
    """
    described = {
        "weights": weights,
        "model": dict(model),
        "rope": dict(rope),
        "weights_dtype": weights_dtype,
        "kv_dtype": kv_dtype,
        "page_size": page_size,
        "payloads": list(payloads),
        "layout_version": layout_version,
    }
    if tensor_parallel is not None:
        described["tensor_parallel"] = tensor_parallel
    return hashlib.sha256(_canonical(described)).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _sampled_hash(stored: memoryview) -> str:
    middle = max(0, (len(stored) - _SAMPLE) // 2)
    digest = hashlib.sha256()
    for part in (stored[:_SAMPLE], stored[middle : middle + _SAMPLE], stored[-_SAMPLE:]):
        digest.update(part)
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
