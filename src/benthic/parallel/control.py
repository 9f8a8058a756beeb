"""The scheduler thread's exchanges: rank 0's frame to all, and the least of each number over the ranks. Always gloo."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from benthic.parallel.collectives import exchange

BUFFER_BYTES = 16 << 10  # a tick's frame as a rule; a longer one takes a second broadcast
_HEAD_BYTES = 8  # the length, little-endian


class Control(Protocol):
    """Exchanges between the schedulers of `size` ranks, in the same order on each."""

    rank: int
    size: int
    collectives: int  # calls that have gone over the network since start

    def share(self, data: bytes | None) -> bytes:
        """Rank 0's bytes; the others give None and wait for them."""

    def min_reduce(self, values: Sequence[int]) -> Sequence[int]:
        """Element by element the least over the ranks; as many values on each."""


class Alone:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1
    collectives = 0

    def share(self, data: bytes | None) -> bytes:
        """See Control."""
        assert data is not None
        return data

    def min_reduce(self, values: Sequence[int]) -> Sequence[int]:
        """See Control."""
        return values


class GroupControl:
    """Control over a gloo group that nobody else uses. One thread only."""

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        """None: the default group."""
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.collectives = 0
        self._group = group
        self._buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)

    def share(self, data: bytes | None) -> bytes:
        """See Control."""
        buffer, room = self._buffer, BUFFER_BYTES - _HEAD_BYTES
        if self.rank == 0:
            assert data is not None
            head = len(data).to_bytes(_HEAD_BYTES, "little") + data[:room]
            buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(buffer)
        length = int.from_bytes(buffer[:_HEAD_BYTES].numpy().tobytes(), "little")
        got = buffer[_HEAD_BYTES : _HEAD_BYTES + min(length, room)].numpy().tobytes()
        if length <= room:
            return got
        rest = torch.empty(length - room, dtype=torch.uint8)
        if data is not None:
            rest.copy_(torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8))
        self._broadcast(rest)
        return got + rest.numpy().tobytes()

    def min_reduce(self, values: Sequence[int]) -> Sequence[int]:
        """See Control."""
        self.collectives += 1
        tensor = torch.tensor(list(values), dtype=torch.int64)
        with exchange():
            dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self.collectives += 1
        with exchange():
            dist.broadcast(tensor, group=self._group, group_src=0)


def gather_ints(control: Control, value: int) -> tuple[int, ...]:
    """Each rank's `value`, below 2^62, in rank order, by one MIN."""
    if control.size == 1:
        return (value,)
    far = 1 << 62
    return tuple(control.min_reduce([value if rank == control.rank else far for rank in range(control.size)]))
