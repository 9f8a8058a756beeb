"""A reader that shows quantised weights as plain tensors.

Whether a weight is quantised is decided by its stored type and the scale beside it, never by lists of modules: those in
published files name modules that do not exist.
"""

import re
from collections import Counter
from pathlib import Path

import torch

from benthic.common.errors import ModelError
from benthic.quantization.fp8 import dequantise_fp8, scale_shape
from benthic.weights.interface import TensorReader
from benthic.weights.tensor_info import TensorInfo

_FP8 = "F8_E4M3"
_SCALE = "_scale_inv"  # behind the name of the weight
_FP8_SCALES = ".weight" + _SCALE
_NVFP4_SCALES = ".weight_scale_2"
_NUMBERED = re.compile(r"^model\.|\b(layers|experts)\.\d+\.")


class DequantisingReader:
    """A TensorReader over another: fp8 weights load as float32, their scales are hidden.

    Raises ModelError, before anything is loaded, for weights without scales, scales without weights, scales of another
    shape or type than the weight's blocks need, and for NVFP4; on loading, for scales that are not positive and finite.
    """

    def __init__(self, stored: TensorReader) -> None:
        self._stored = stored
        self._fp8 = _fp8_weights(stored)
        hidden = {name + _SCALE for name in self._fp8}
        self._names = tuple(name for name in stored.names() if name not in hidden)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold tensors."""
        return self._stored.files

    def names(self) -> tuple[str, ...]:
        """Names of all tensors but scales."""
        return self._names

    def stored_names(self) -> tuple[str, ...]:
        """Names of all tensors, scales too."""
        return tuple(self._stored.stored_names())

    def info(self, name: str) -> TensorInfo:
        """Shape, stored type and stored bytes (without those of the scales). Raises ModelError."""
        return self._stored.info(name)

    def raw(self, name: str) -> memoryview:
        """The stored bytes of a tensor or of scales. Raises ModelError."""
        return self._stored.raw(name)

    def load(self, name: str) -> torch.Tensor:
        """The tensor on the CPU: float32 where it is fp8, else as stored. Raises ModelError."""
        if name not in self._fp8:
            return self._stored.load(name)
        scale = self._stored.load(name + _SCALE)
        usable = torch.isfinite(scale) & (scale > 0)
        if not usable.all():
            row, column = (int(i) for i in (~usable).nonzero()[0])
            raise _refuse(
                self._stored,
                f"tensor {name + _SCALE!r} has {scale[row, column].item()} for block ({row}, {column}) of "
                f"{list(scale.shape)}; expected positive finite scales; the checkpoint is damaged",
            )
        return dequantise_fp8(self._stored.load(name), scale)

    def summary(self) -> dict[str, dict[str, int]]:
        """How many matrices of each kind are stored how: stored type, then module (no layer, no expert) -> count."""
        counts: dict[str, Counter[str]] = {}
        for name in self._names:
            info = self._stored.info(name)
            if name.endswith(".weight") and len(info.shape) == 2:
                module = _NUMBERED.sub(_without_number, name.removesuffix(".weight"))
                counts.setdefault(info.dtype, Counter())[module] += 1
        return {dtype: dict(sorted(modules.items())) for dtype, modules in sorted(counts.items())}


def _without_number(match: re.Match[str]) -> str:
    return "experts." if match[1] == "experts" else ""


def _fp8_weights(stored: TensorReader) -> frozenset[str]:
    """Names of the weights in fp8; each has scales that fit. Raises ModelError."""
    found = []
    names = frozenset(stored.stored_names())
    for name in stored.stored_names():
        info = stored.info(name)
        if name.endswith(_FP8_SCALES):
            _check_surplus(stored, name, names)
        elif name.endswith(_NVFP4_SCALES) or (name.endswith(".weight") and info.dtype == "U8"):
            raise _refuse(
                stored, f"tensor {name!r} belongs to NVFP4 weights, which can't be loaded yet; take bf16 or fp8 ones"
            )
        elif info.dtype == _FP8:
            _check_scales(stored, info, names)
            found.append(name)
    return frozenset(found)


def _check_surplus(stored: TensorReader, scales: str, names: frozenset[str]) -> None:
    weight = scales.removesuffix(_SCALE)
    if weight not in names:
        raise _refuse(stored, f"tensor {scales!r} has no weight {weight!r} beside it; download the checkpoint again")
    dtype = stored.info(weight).dtype
    if dtype != _FP8:
        raise _refuse(stored, f"tensor {scales!r} are scales, but {weight!r} is stored as {dtype}, expected {_FP8}")


def _check_scales(stored: TensorReader, weight: TensorInfo, names: frozenset[str]) -> None:
    scales = weight.name + _SCALE
    if scales not in names:
        other = weight.name + "_scale"
        hint = f"; found {other!r}: scales of rows or of the whole tensor are not supported" if other in names else ""
        raise _refuse(
            stored, f"tensor {weight.name!r} is stored as {_FP8}, but its scales {scales!r} are missing{hint}"
        )
    info = stored.info(scales)
    if len(weight.shape) != 2:
        raise _refuse(
            stored, f"tensor {weight.name!r} ({_FP8}) has shape {list(weight.shape)}, expected two dimensions"
        )
    wanted = scale_shape(weight.shape)
    if info.shape != wanted:
        raise _refuse(
            stored,
            f"tensor {scales!r} has shape {list(info.shape)}, expected {list(wanted)}: one scale for each 128 x 128 of "
            f"{list(weight.shape)}",
        )
    if info.dtype != "F32":
        raise _refuse(stored, f"tensor {scales!r} is stored as {info.dtype}, expected F32")


def _refuse(stored: TensorReader, what: str) -> ModelError:
    return ModelError(f"{stored.files[0].parent}: {what}")
