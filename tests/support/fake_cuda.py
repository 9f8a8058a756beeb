"""A device that does what its streams hold as late as it may, in any order that streams and events allow.

It works only while somebody asks whether it has come to an event, or waits for it. Its memory is the test's. It stands
in for the CUDA runtime under tiers.host.cuda_copies: a missing wait lets a copy run before what it must follow.
"""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable

from benthic.tiers.host.cudart import DEVICE_TO_HOST, HOST_TO_DEVICE


class FakeEvent:
    """Reached once the stream that recorded it has come to it."""

    def __init__(self) -> None:
        self.fired = False


Work = Callable[[], bool]  # True: done; False: not yet, ask again


class FakeCuda:
    """Implements cuda_copies.CudaRuntime and slabs.Registrar. `MAIN` is the stream that steps compute on."""

    MAIN = 7

    def __init__(self, seed: int = 0, max_pitch: int = 1 << 31, max_registered: int = 1 << 62) -> None:
        self.max_pitch = max_pitch
        self.max_registered = max_registered
        self.registered: dict[int, int] = {}
        self.copies: list[tuple[int, int, int]] = []  # (kind, height, pinned)
        self._streams: dict[int, deque[Work]] = {self.MAIN: deque()}
        self._dice = random.Random(seed)
        self._lock = threading.Lock()

    def launch(self, work: Callable[[], object], stream: int = MAIN) -> None:
        """Queue a kernel."""
        self._queue(stream, lambda: (work(), True)[1])

    def work(self) -> None:
        """Do one thing, if anything can be done."""
        with self._lock:
            self._work()

    def stop(self) -> None:
        """Do all that is left."""
        with self._lock:
            self._work_until(lambda: not any(self._streams.values()))

    def start_thread(self) -> None:
        pass

    def current_stream(self) -> int:
        return self.MAIN

    def create_stream(self) -> int:
        with self._lock:
            stream = 100 + len(self._streams)
            self._streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            self._work_until(lambda: not self._streams[stream])

    def record(self, stream: int) -> FakeEvent:
        event = FakeEvent()

        def fire() -> bool:
            event.fired = True
            return True

        self._queue(stream, fire)
        return event

    def wait(self, stream: int, event: FakeEvent) -> None:
        self._queue(stream, lambda: event.fired)

    def reached(self, event: FakeEvent) -> bool:
        with self._lock:
            for _ in range(self._dice.randint(0, 3)):
                self._work()
            return event.fired

    def synchronize(self, event: FakeEvent) -> None:
        with self._lock:
            self._work_until(lambda: event.fired)

    def copier(
        self, stream: int, kind: int, dst_pitch: int, src_pitch: int, width: int, height: int, pinned: bool
    ) -> Callable[[int, int], None]:
        assert kind in (HOST_TO_DEVICE, DEVICE_TO_HOST)
        assert min(dst_pitch, src_pitch) >= width

        def copy(dst: int, src: int) -> None:
            def move() -> bool:
                for row in range(height):
                    ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)
                return True

            self.copies.append((kind, height, pinned))
            self._queue(stream, move)

        return copy

    def register(self, address: int, num_bytes: int) -> None:
        if sum(self.registered.values()) + num_bytes > self.max_registered:
            raise RuntimeError("cudaHostRegister: out of memory (2)")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def _queue(self, stream: int, work: Work) -> None:
        with self._lock:
            self._streams[stream].append(work)

    def _work(self) -> bool:
        """Do one thing, of a stream that can go on; False where none can."""
        waiting = [stream for stream in self._streams.values() if stream]
        self._dice.shuffle(waiting)
        for stream in waiting:
            if stream[0]():
                stream.popleft()
                return True
        return False

    def _work_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self._work(), "every stream waits for another"
