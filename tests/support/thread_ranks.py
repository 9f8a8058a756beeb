"""Ranks as threads of one process: the collectives of `parallel` without sockets, for quick tests of what uses them."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
TIMEOUT_S = 60.0


class Meeting:
    """Where the ranks put what they give and read what the others gave."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[torch.Tensor | Sequence[int] | bytes | None] = [None] * size


class ThreadCollectives:
    """Implements parallel.collectives.Collectives and parallel.control.Control. One object a rank."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.collectives = 0
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._meeting = meeting

    def _exchange(self, value: T) -> list[T]:
        meeting = self._meeting
        meeting.given[self.rank] = value  # type: ignore[call-overload]
        meeting.barrier.wait(TIMEOUT_S)
        got = list(meeting.given)
        meeting.barrier.wait(TIMEOUT_S)
        return got  # type: ignore[return-value]

    def _tensors(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        assert x.is_contiguous()
        self.calls.append((name, tuple(x.shape)))
        got = self._exchange((name, x.clone()))
        assert all(other == name and tensor.shape == x.shape and tensor.dtype == x.dtype for other, tensor in got), (
            f"the ranks meet in different calls: {[(other, tensor.shape, tensor.dtype) for other, tensor in got]}"
        )
        return [tensor for _, tensor in got]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._tensors("all_gather", x))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._tensors("all_reduce", x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return x.copy_(total)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._tensors("reduce_scatter", x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.chunk(self.size)[self.rank].clone()

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._tensors("broadcast", x)[0])

    def share(self, data: bytes | None) -> bytes:
        self.collectives += 1
        got = self._exchange(data)[0]
        assert got is not None
        return got

    def min_reduce(self, values: Sequence[int]) -> Sequence[int]:
        self.collectives += 1
        return [min(column) for column in zip(*self._exchange(list(values)), strict=True)]


def run_ranks(size: int, body: Callable[[ThreadCollectives], T]) -> list[T]:
    """What `body` returns on each of `size` ranks, side by side. Raises the first error of any of them."""
    meeting = Meeting(size)
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadCollectives(meeting, rank, size))
        except BaseException as error:  # noqa: BLE001  # raised again below
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert not meeting.barrier.broken, "a rank waited in vain for the others"
    return results  # type: ignore[return-value]
