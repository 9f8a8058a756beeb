"""Host arrays to the device in one copy a step: packed into one pinned buffer, of which a few rotate."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.runner.streams import record_event

_ALIGN = 16  # bytes; every dtype's own alignment divides it
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Staging:
    """Owns the pinned buffers. A buffer is written again only after the copy out of it has finished on the device."""

    def __init__(self, device: torch.device, depth: int = 3) -> None:
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * depth
        self._copied: list[Any] = [None] * depth  # CUDA events
        self._turn = 0

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Device tensors of the arrays' shapes and types (int32, int64, float32), in order on the current stream.

        The tensors are views of one allocation. On the CPU they are copies too, so a caller may reuse its arrays.
        """
        offsets, total = {}, 0
        for name, array in arrays.items():
            offsets[name] = total
            total += -(-array.nbytes // _ALIGN) * _ALIGN
        host = self._host_buffer(total)
        packed = host.numpy()
        for name, array in arrays.items():
            packed[offsets[name] : offsets[name] + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        device = self._send(host[:total])
        return {
            name: device[offsets[name] : offsets[name] + array.nbytes]
            .view(_TORCH_DTYPES[array.dtype])
            .view(array.shape)
            for name, array in arrays.items()
        }

    def _host_buffer(self, size: int) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()  # fired two steps ago: does not wait in practice
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(max(1 << 16, 2 * size), dtype=torch.uint8, pin_memory=True)
            self._buffers[self._turn] = buffer
        return buffer

    def _send(self, host: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return host
        device = host.to(self._device, non_blocking=True)
        self._copied[self._turn] = record_event()
        return device
