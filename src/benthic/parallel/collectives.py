"""The forward's exchanges of rows between ranks: even ones, and padded ones for ranks with uneven counts.

Every rank calls the same ones in the same order, from its runner's thread. A padded exchange takes its row count from
the batch, never from the own rank: all ranks know it alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benthic.common.errors import PeerLost

# newer names of the same operations; the old ones warn where both are there
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def exchange() -> Iterator[None]:
    """Around a call of torch.distributed. Raises PeerLost where it breaks off."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors too
        raise PeerLost(f"an exchange with the other ranks broke off: {str(error).splitlines()[0]}") from error


class Collectives(Protocol):
    """Exchanges between `size` ranks. Tensors are contiguous, of equal shape and dtype on every rank."""

    rank: int
    size: int

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, …] of each rank -> [size * n, …] in rank order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place; equal on all, bit by bit."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """x [size * n, …] -> [n, …]: of the sum over the ranks, the part of this one."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, in place."""


def padded_gather(group: Collectives, x: torch.Tensor, max_rank_len: int) -> torch.Tensor:
    """x [own rows, …] -> [size * max_rank_len, …]; rank r's rows begin at r * max_rank_len, padding behind them."""
    assert len(x) <= max_rank_len
    if len(x) < max_rank_len:
        padded = x.new_zeros((max_rank_len, *x.shape[1:]))
        padded[: len(x)] = x
        x = padded
    return group.all_gather(x.contiguous())


def padded_scatter(group: Collectives, x: torch.Tensor, own_len: int) -> torch.Tensor:
    """x [size * max_rank_len, …], laid out as by `padded_gather`, summed over the ranks -> this rank's [own_len, …]."""
    return group.reduce_scatter(x)[:own_len]


@dataclass(slots=True)
class Traffic:
    """What a group has moved since start: calls and bytes that this rank gave, by operation."""

    calls: dict[str, int]
    num_bytes: dict[str, int]

    def count(self, name: str, x: torch.Tensor) -> None:
        """Note one call."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.num_bytes[name] = self.num_bytes.get(name, 0) + x.numel() * x.element_size()


class GroupCollectives:
    """Collectives over a process group of torch.distributed. One thread only.

    Gloo moves host memory: tensors of a device go through it, so ranks that share one GPU can work together, slowly.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.traffic = Traffic({}, {})
        self._group = group
        self._through_host = dist.get_backend(group) == "gloo"

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self.traffic.count("all_gather", x)
        given = self._given(x)
        out = given.new_empty((self.size * len(given), *given.shape[1:]))
        with exchange():
            _gather_into(out, given, group=self._group)
        return out.to(x.device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self.traffic.count("all_reduce", x)
        given = self._given(x)
        with exchange():
            dist.all_reduce(given, group=self._group)
        return x if given is x else x.copy_(given)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self.traffic.count("reduce_scatter", x)
        given = self._given(x)
        out = given.new_empty((len(given) // self.size, *given.shape[1:]))
        with exchange():
            _scatter_sum(out, given, group=self._group)
        return out.to(x.device)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        self.traffic.count("broadcast", x)
        given = self._given(x)
        with exchange():
            dist.broadcast(given, group=self._group, group_src=0)
        return x if given is x else x.copy_(given)

    def _given(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu() if self._through_host and x.is_cuda else x


def forward_group(backend: str, timeout_s: float) -> GroupCollectives:
    """A group of all ranks for the forward's thread, beside the default one; to be called by all of them."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
    return GroupCollectives(group)
