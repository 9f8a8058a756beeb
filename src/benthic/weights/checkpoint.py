"""Reads a folder of safetensors: one file, or shards named by `model.safetensors.index.json`. Mapped, nothing copied.

A safetensors file is a uint64 length, that many bytes of JSON `{name: {dtype, shape, data_offsets: [begin, end]}}`, and
then the tensors' bytes, which the offsets count from (https://github.com/huggingface/safetensors).
"""

import json
import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from benthic.common.errors import ModelError
from benthic.weights.interface import TensorReader
from benthic.weights.tensor_info import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100 << 20  # bytes; the format's own limit
_PLAIN_NAME = re.compile(r"[^/\\\0]+")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stored:
    info: TensorInfo
    begin: int
    data: mmap.mmap


class SafetensorsReader:
    """The tensors of a checkpoint folder. Raises ModelError for a missing, damaged or contradictory file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors, self.files = _open_folder(folder)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._tensors)

    def stored_names(self) -> tuple[str, ...]:
        """The same."""
        return self.names()

    def info(self, name: str) -> TensorInfo:
        """Type and shape of a tensor. Raises ModelError."""
        return self._stored(name).info

    def raw(self, name: str) -> memoryview:
        """The stored bytes of a tensor, not copied. Raises ModelError."""
        stored = self._stored(name)
        return memoryview(stored.data)[stored.begin : stored.begin + stored.info.num_bytes]

    def load(self, name: str) -> torch.Tensor:
        """The tensor on the CPU as stored, sharing the mapped file. Raises ModelError."""
        info = self.info(name)
        if info.dtype not in _DTYPES:
            raise ModelError(
                f"{self.folder}: tensor {name!r} is stored as {info.dtype}; supported: {', '.join(_DTYPES)}"
            )
        if not info.num_bytes:
            return torch.empty(info.shape, dtype=_DTYPES[info.dtype])
        stored = torch.frombuffer(self.raw(name), dtype=torch.uint8)
        if stored.data_ptr() % _DTYPES[info.dtype].itemsize:
            stored = stored.clone()  # old files do not align their tensors
        return stored.view(_DTYPES[info.dtype]).view(info.shape)

    def _stored(self, name: str) -> _Stored:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(f"{self.folder}: no tensor {name!r} among its {len(self._tensors)} tensors") from None


def take(reader: TensorReader, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor `name` of the given shape. Raises ModelError with the name and both shapes if it has another."""
    info = reader.info(name)
    if info.shape != shape:
        raise ModelError(
            f"{reader.files[0].parent}: tensor {name!r} has shape {list(info.shape)}, the config wants {list(shape)}"
        )
    return reader.load(name)


def total_bytes(reader: TensorReader, names: Iterable[str]) -> int:
    """Stored bytes of the tensors `names`."""
    return sum(reader.info(name).num_bytes for name in names)


def _open_folder(folder: Path) -> tuple[dict[str, _Stored], tuple[Path, ...]]:
    index = folder / INDEX_NAME
    if index.is_file():
        return _open_shards(folder, _read_index(index))
    single = folder / _SINGLE_NAME
    if not single.is_file():
        others = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; found {', '.join(others[:3])}: convert them to safetensors" if others else ""
        raise ModelError(f"{folder}: no weights: expected {_SINGLE_NAME} or {INDEX_NAME}{hint}")
    return _open_file(single), (single,)


def _open_shards(folder: Path, weight_map: dict[str, str]) -> tuple[dict[str, _Stored], tuple[Path, ...]]:
    files = {name: folder / name for name in sorted(set(weight_map.values()))}
    missing = [name for name, path in files.items() if not path.is_file()]
    if missing:
        wanted = sorted(tensor for tensor, name in weight_map.items() if name == missing[0])
        raise ModelError(
            f"{folder}: {INDEX_NAME} names {len(files)} files, {len(missing)} of them missing: "
            f"{', '.join(missing[:3])} (holds {len(wanted)} tensors, e.g. {wanted[0]!r}); download the checkpoint again"
        )
    opened = {name: _open_file(path) for name, path in files.items()}
    tensors: dict[str, _Stored] = {}
    for tensor, name in weight_map.items():
        if tensor not in opened[name]:
            raise ModelError(
                f"{folder}: {INDEX_NAME} expects tensor {tensor!r} in {name}, which has {len(opened[name])} tensors "
                f"and not this one; index and files belong to different checkpoints"
            )
        tensors[tensor] = opened[name][tensor]
    return tensors, tuple(files.values())


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: expected a 'weight_map' of tensor names to file names, found none")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
            raise ModelError(
                f"{path}: tensor {tensor!r} is said to be in {name!r}, expected a file name of the same folder"
            )
    return weight_map


def _open_file(path: Path) -> dict[str, _Stored]:
    try:
        with path.open("rb") as file:
            # a private mapping is writable for torch, which warns of read-only buffers; nothing ever writes to it
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from None
    except ValueError:
        raise ModelError(f"{path}: an empty file, expected a safetensors header; download it again") from None
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MAX_HEADER, len(data) - 8):
        raise ModelError(
            f"{path}: damaged or cut off: the header needs {8 + length} bytes, the file has {len(data)}; "
            f"download it again"
        )
    try:
        header = json.loads(data[8 : 8 + length].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: damaged: its header of {length} bytes is not JSON ({error}); download it again"
        ) from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: damaged: its header is a {type(header).__name__}, expected a table of tensors")
    return {
        name: _parse_entry(path, name, entry, data, 8 + length)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _parse_entry(path: Path, name: str, entry: Any, data: mmap.mmap, base: int) -> _Stored:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise ModelError(f"{path}: damaged: tensor {name!r} is described by {str(entry)[:200]}")
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ModelError(f"{path}: damaged: tensor {name!r} has shape {str(shape)[:200]}")
    info = TensorInfo(name, dtype, tuple(shape), end - begin)
    if not 0 <= begin <= end or base + end > len(data):
        raise ModelError(
            f"{path}: damaged or cut off: tensor {name!r} ends at byte {base + end}, the file has {len(data)}; "
            f"download it again"
        )
    if dtype in _DTYPES and prod(shape) * _DTYPES[dtype].itemsize != info.num_bytes:
        raise ModelError(
            f"{path}: damaged: tensor {name!r} ({dtype}, {shape}) should have "
            f"{prod(shape) * _DTYPES[dtype].itemsize} bytes, found {info.num_bytes}"
        )
    return _Stored(info, base + begin, data)
