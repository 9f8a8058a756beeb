"""Reads GGUF files (versions 2 and 3): metadata and each tensor's place, by `struct` over a mapped file. No torch.

Layout, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

    4 bytes "GGUF", uint32 version, uint64 number of tensors, uint64 number of metadata entries
    each entry:  string key, uint32 type, value
                 (string: uint64 length, bytes; array: uint32 type, uint64 length, values)
    each tensor: string name, uint32 number of dimensions, uint64 each dimension (innermost first), uint32 type,
                 uint64 offset
    padding to `general.alignment` (32 where left out), then the tensors' bytes; offsets count from here

Arrays are skipped over when the file is opened, and decoded when asked for: a vocabulary has 10**5 strings.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benthic.common.errors import ModelError
from benthic.weights.tensor_info import TensorInfo

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `block` values are stored in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LazyArray:
    position: int
    kind: int
    count: int


@dataclass(frozen=True, slots=True)
class _Placed:
    info: TensorInfo
    start: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, tensors by name. Raises ModelError for whatever is wrong with the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        cursor = _Cursor(path, self._map)
        self._metadata: dict[str, Any] = {}
        num_tensors, num_entries = _read_header(cursor)
        for _ in range(num_entries):
            key = cursor.string("a metadata key")
            self._metadata[key] = _read_value(cursor, key)
        self._tensors = _read_tensors(cursor, num_tensors, self._alignment())

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def keys(self) -> tuple[str, ...]:
        """All metadata keys."""
        return tuple(self._metadata)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key`: int, float, bool, str or a list of them (decoded at every call)."""
        value = self._metadata.get(key, default)
        return _decode_array(_Cursor(self.path, self._map, value.position), value, key) if _is_lazy(value) else value

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, as the file has them."""
        return tuple(self._tensors)

    def stored_names(self) -> tuple[str, ...]:
        """The same: nothing is hidden."""
        return self.names()

    def info(self, name: str) -> TensorInfo:
        """Type and shape (outermost first) of a tensor. Raises ModelError."""
        return self._placed(name).info

    def raw(self, name: str) -> memoryview:
        """The stored bytes of a tensor, not copied. Raises ModelError."""
        placed = self._placed(name)
        return memoryview(self._map)[placed.start : placed.start + placed.info.num_bytes]

    def _placed(self, name: str) -> _Placed:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(f"{self.path}: no tensor {name!r} among its {len(self._tensors)} tensors") from None

    def _alignment(self) -> int:
        alignment = self._metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}, expected a power of two up to 1048576")
        return alignment


def is_gguf(path: Path) -> bool:
    """Whether the file begins like a GGUF file."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


class _Cursor:
    """A position in the mapped file; every read checks that the file has the bytes."""

    def __init__(self, path: Path, data: mmap.mmap, position: int = 0) -> None:
        self.path, self.data, self.position, self.size = path, data, position, len(data)

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.position:
            raise ModelError(
                f"{self.path}: damaged or cut off: {what} needs {count} bytes at offset {self.position}, so at least "
                f"{self.position + count} bytes in all, but the file has {self.size}; fetch the file again"
            )

    def scalar(self, code: str, what: str) -> Any:
        width = struct.calcsize("<" + code)
        self.need(width, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += width
        return value

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        start = self.position
        self.position += length
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} at offset {start} is not UTF-8 ({error.reason})") from None

    def skip_strings(self, count: int, what: str) -> None:
        data, position, last, unpack = self.data, self.position, self.size - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position > last:
                break
            position += 8 + unpack(data, position)[0]
        else:
            if position <= self.size:
                self.position = position
                return
        raise self.damaged(f"{what}: an array of {count} strings runs past the end of the file, {self.size} bytes")

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: damaged or cut off: {what}; fetch the file again")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # a private mapping is writable for torch, which warns of read-only buffers; nothing ever writes to it
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from None
    except ValueError:
        raise ModelError(f"{path}: not a GGUF file: expected {len(MAGIC)} bytes {MAGIC!r}, found 0 bytes") from None


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    found = bytes(cursor.data[:4])
    if found != MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file: it begins with {found!r}, expected {MAGIC!r}")
    cursor.position = 4
    version = cursor.scalar("I", "the version")
    if version not in _VERSIONS:
        raise ModelError(f"{cursor.path}: GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
    num_tensors, num_entries = cursor.scalar("Q", "the header"), cursor.scalar("Q", "the header")
    left = cursor.size - cursor.position
    for count, least, what in ((num_tensors, 24, "tensors"), (num_entries, 13, "metadata entries")):
        if count * least > left:
            raise cursor.damaged(
                f"its header promises {count} {what}, which need at least {count * least} more bytes; found {left} "
                f"after the header, {cursor.size} in all"
            )
    return num_tensors, num_entries


def _read_value(cursor: _Cursor, key: str) -> Any:
    what = f"metadata {key!r}"
    kind = cursor.scalar("I", what)
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _skip_array(cursor, what)
    if kind not in _SCALARS:
        raise cursor.damaged(f"{what} has the unknown type {kind}")
    value = cursor.scalar(_SCALARS[kind], what)
    return bool(value) if kind == _BOOL else value


def _skip_array(cursor: _Cursor, what: str) -> _LazyArray:
    kind, count = cursor.scalar("I", what), cursor.scalar("Q", what)
    array = _LazyArray(cursor.position, kind, count)
    if kind == _STRING:
        cursor.need(8 * count, f"{what}: an array of {count} strings")
        cursor.skip_strings(count, what)
    elif kind in _SCALARS:
        width = struct.calcsize("<" + _SCALARS[kind]) * count
        cursor.need(width, f"{what}: an array of {count} values")
        cursor.position += width
    else:
        raise cursor.damaged(f"{what} is an array of the unsupported type {kind}")
    return array


def _is_lazy(value: object) -> bool:
    return isinstance(value, _LazyArray)


def _decode_array(cursor: _Cursor, array: _LazyArray, key: str) -> list[Any]:
    if array.kind != _STRING:
        values = struct.unpack_from(f"<{array.count}{_SCALARS[array.kind]}", cursor.data, array.position)
        return [bool(v) for v in values] if array.kind == _BOOL else list(values)
    data, position, unpack = cursor.data, array.position, struct.Struct("<Q").unpack_from
    texts: list[str] = []
    append: Callable[[str], None] = texts.append
    try:
        for _ in range(array.count):
            end = position + 8 + unpack(data, position)[0]
            append(data[position + 8 : end].decode("utf-8"))
            position = end
    except UnicodeDecodeError as error:
        raise cursor.damaged(f"metadata {key!r}: string {len(texts)} is not UTF-8 ({error.reason})") from None
    return texts


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, _Placed]:
    listed: list[tuple[TensorInfo, int]] = []
    for _ in range(count):
        name = cursor.string("a tensor's name")
        what = f"tensor {name!r}"
        num_dims = cursor.scalar("I", what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.damaged(f"{what} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
        dims = tuple(cursor.scalar("Q", what) for _ in range(num_dims))
        kind, offset = cursor.scalar("I", what), cursor.scalar("Q", what)
        listed.append((_tensor_info(cursor, name, dims, kind), offset))
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, _Placed] = {}
    for info, offset in listed:
        if info.name in tensors:
            raise cursor.damaged(f"tensor {info.name!r} is listed twice")
        end = base + offset + info.num_bytes
        if offset % alignment or end > cursor.size:
            raise cursor.damaged(
                f"tensor {info.name!r} ({info.dtype}, {list(info.shape)}) has {info.num_bytes} bytes at offset "
                f"{base + offset} (aligned to {alignment}), so {end} bytes at least, found {cursor.size}"
            )
        tensors[info.name] = _Placed(info, base + offset)
    return tensors


def _tensor_info(cursor: _Cursor, name: str, dims: tuple[int, ...], kind: int) -> TensorInfo:
    block = BLOCK_TYPES.get(kind)
    if block is None:
        supported = ", ".join(sorted(b.name for b in BLOCK_TYPES.values()))
        raise ModelError(
            f"{cursor.path}: tensor {name!r} is stored as {_OTHER_TYPES.get(kind, f'type {kind}')}, which is not "
            f"supported; supported: {supported}"
        )
    count = 1
    for dim in dims:
        count *= dim
    if count < 1 or dims[0] % block.block:
        raise cursor.damaged(f"tensor {name!r} has shape {list(dims[::-1])}, expected whole blocks of {block.block}")
    return TensorInfo(name, block.name, dims[::-1], count // block.block * block.num_bytes)
