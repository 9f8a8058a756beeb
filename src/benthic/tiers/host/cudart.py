"""The few CUDA runtime calls that page copies need, through ctypes on the libcudart that torch itself has loaded.

Calls that only queue work keep the interpreter lock: each takes a microsecond or two, and getting the lock back from a
busy thread can take milliseconds. Calls that may block let go of it. A failed call is cleared from the thread's
last error, which torch would report as its own.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind
_NOT_READY = 600  # cudaErrorNotReady
_STREAM_NON_BLOCKING = 1
_EVENT_FLAGS = 1 | 2  # blocking wait; no timing
_REGISTER_PORTABLE = 1
_MAX_PITCH = 11  # cudaDevAttrMaxPitch

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t


def current_device() -> torch.device:
    """torch's current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


class CudaError(RuntimeError):
    """A CUDA runtime call failed. `code` is the cudaError_t."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


class Event:
    """A CUDA event that lives as long as somebody holds it."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, handle: int, destroy: Callable[[int], object]) -> None:
        self.handle = handle
        self._destroy = destroy

    def __del__(self) -> None:
        self._destroy(self.handle)


class _Position(ctypes.Structure):
    _fields_ = [(name, _size) for name in ("x", "y", "z")]


class _PitchedPointer(ctypes.Structure):
    _fields_ = [("ptr", _pointer), ("pitch", _size), ("xsize", _size), ("ysize", _size)]


class _Extent(ctypes.Structure):
    _fields_ = [(name, _size) for name in ("width", "height", "depth")]


class _Copy3D(ctypes.Structure):
    """cudaMemcpy3DParms."""

    _fields_ = [
        ("src_array", _pointer),
        ("src_pos", _Position),
        ("src", _PitchedPointer),
        ("dst_array", _pointer),
        ("dst_pos", _Position),
        ("dst", _PitchedPointer),
        ("extent", _Extent),
        ("kind", ctypes.c_int),
    ]


class Cudart:
    """Implements cuda_copies.CudaRuntime on one device. Holds no state but the loaded library."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        path = _library_path()
        self._quick, self._slow = ctypes.PyDLL(path), ctypes.CDLL(path)
        self._copy_2d = self._function(self._quick, "cudaMemcpy2DAsync", _COPY_2D)
        self._copy_2d_pageable = self._function(self._slow, "cudaMemcpy2DAsync", _COPY_2D)
        self._copy_3d = self._function(self._quick, "cudaMemcpy3DAsync", (_pointer, _pointer))
        self._copy_3d_pageable = self._function(self._slow, "cudaMemcpy3DAsync", (_pointer, _pointer))
        self._record = self._function(self._quick, "cudaEventRecord", (_pointer, _pointer))
        self._query = self._function(self._quick, "cudaEventQuery", (_pointer,))
        self._wait = self._function(self._quick, "cudaStreamWaitEvent", (_pointer, _pointer, ctypes.c_uint))
        self._create = self._function(self._quick, "cudaEventCreateWithFlags", (_pointer, ctypes.c_uint))
        self._destroy = self._function(self._quick, "cudaEventDestroy", (_pointer,))
        self._last_error = self._function(self._quick, "cudaGetLastError", ())
        self._error_text = self._quick.cudaGetErrorString
        self._error_text.restype = ctypes.c_char_p
        self.max_pitch = self._attribute(_MAX_PITCH)

    def start_thread(self) -> None:
        """Make the device the calling thread's."""
        self._call("cudaSetDevice", (ctypes.c_int,), self._index)

    def current_stream(self) -> int:
        """The stream that torch queues the calling thread's work on."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def create_stream(self) -> int:
        """A stream that does not wait for the default one."""
        stream = _pointer()
        self._call("cudaStreamCreateWithFlags", (_pointer, ctypes.c_uint), ctypes.byref(stream), _STREAM_NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        """Wait for the stream's work and destroy it."""
        self._call("cudaStreamSynchronize", (_pointer,), stream)
        self._call("cudaStreamDestroy", (_pointer,), stream)

    def record(self, stream: int) -> Event:
        """An event behind everything that the stream has queued."""
        handle = _pointer()
        self._check("cudaEventCreateWithFlags", self._create(ctypes.byref(handle), _EVENT_FLAGS))
        assert handle.value is not None
        event = Event(handle.value, self._destroy)
        self._check("cudaEventRecord", self._record(event.handle, stream))
        return event

    def wait(self, stream: int, event: Event) -> None:
        """What the stream gets from now on waits for the event."""
        self._check("cudaStreamWaitEvent", self._wait(stream, event.handle, 0))

    def reached(self, event: Event) -> bool:
        """Whether the device has come to the event."""
        code = self._query(event.handle)
        if code == _NOT_READY:
            self._last_error()  # else torch would take it for an error of its own
            return False
        self._check("cudaEventQuery", code)
        return True

    def synchronize(self, event: Event) -> None:
        """Sleep until the device has come to the event."""
        self._call("cudaEventSynchronize", (_pointer,), event.handle)

    def copier(
        self, stream: int, kind: int, dst_pitch: int, src_pitch: int, width: int, height: int, pinned: bool
    ) -> Callable[[int, int], None]:
        """A function (dst, src) that queues a copy of `height` rows of `width` bytes, each `pitch` behind the last.

        Both pitches are multiples of the width. Beyond `max_pitch` the rows are taken for planes of one row each.
        """
        if max(dst_pitch, src_pitch) > self.max_pitch:
            return self._copier_3d(stream, kind, dst_pitch, src_pitch, width, height, pinned)
        call = self._copy_2d if pinned else self._copy_2d_pageable
        pitches, sizes = (_size(dst_pitch), _size(src_pitch)), (_size(width), _size(height))
        way, queue = ctypes.c_int(kind), _pointer(stream)

        def copy(dst: int, src: int) -> None:
            code = call(dst, pitches[0], src, pitches[1], sizes[0], sizes[1], way, queue)
            if code:
                self._check("cudaMemcpy2DAsync", code)

        return copy

    def _copier_3d(
        self, stream: int, kind: int, dst_pitch: int, src_pitch: int, width: int, height: int, pinned: bool
    ) -> Callable[[int, int], None]:
        call = self._copy_3d if pinned else self._copy_3d_pageable
        plan = _Copy3D(extent=_Extent(width, 1, height), kind=kind)
        plan.dst = _PitchedPointer(None, width, width, dst_pitch // width)
        plan.src = _PitchedPointer(None, width, width, src_pitch // width)
        reference, queue = ctypes.byref(plan), _pointer(stream)

        def copy(dst: int, src: int) -> None:
            plan.dst.ptr, plan.src.ptr = dst, src
            code = call(reference, queue)
            if code:
                self._check("cudaMemcpy3DAsync", code)

        return copy

    def register(self, address: int, num_bytes: int) -> None:
        """Lock the memory and let the device copy from and to it. Raises CudaError."""
        self._call("cudaHostRegister", (_pointer, _size, ctypes.c_uint), address, num_bytes, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises CudaError."""
        self._call("cudaHostUnregister", (_pointer,), address)

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        types = (_pointer, ctypes.c_int, ctypes.c_int)
        self._call("cudaDeviceGetAttribute", types, ctypes.byref(value), attribute, self._index)
        return value.value

    def _call(self, name: str, types: Sequence[Any], *arguments: Any) -> None:
        """A call that may take long: without the interpreter lock."""
        self._check(name, self._function(self._slow, name, types)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            self._last_error()
            raise CudaError(name, code, (self._error_text(code) or b"unknown error").decode())

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, types: Sequence[Any]) -> Any:
        function = library[name]  # a new object each time, so that types are its own
        function.argtypes, function.restype = tuple(types), ctypes.c_int
        return function


_COPY_2D = (_pointer, _size, _pointer, _size, _size, _size, ctypes.c_int, _pointer)


def _library_path() -> str:
    """The libcudart in this process; torch loads its own."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if os.path.basename(path).startswith("libcudart.so"):
            return path
    raise CudaError("libcudart", 0, "torch has loaded no CUDA runtime library")
