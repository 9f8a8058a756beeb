"""The way back to the host: asynchronous copies into pinned memory on a stream of their own, ended by an event."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.runner.streams import new_stream, record_event


class InFlight:
    """Tensors on their way to the host. Keeps both ends alive until the copy's event has fired."""

    def __init__(self, source: Mapping[str, torch.Tensor], host: dict[str, torch.Tensor], event: Any) -> None:
        self._source: Mapping[str, torch.Tensor] = source
        self._host = host
        self._event = event  # None: already there

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> dict[str, NDArray[Any]]:
        """The arrays, once they are on the host. Blocks without the interpreter lock."""
        if self._event is not None:
            self._event.synchronize()
        self._source = {}
        return {name: np.array(tensor.numpy()) for name, tensor in self._host.items()}  # gives the pinned block back


class CopyOut:
    """Owns the copy stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device) if device.type == "cuda" else None

    def start(self, tensors: Mapping[str, torch.Tensor]) -> InFlight:
        """Begin copying, after what the current stream has queued so far. Nobody may change the tensors later."""
        if self._stream is None or not tensors:
            return InFlight(tensors, dict(tensors), None)
        computed = record_event()
        host = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for n, t in tensors.items()}
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            for name, tensor in tensors.items():
                host[name].copy_(tensor, non_blocking=True)
            copied = record_event()
        return InFlight(tensors, host, copied)
