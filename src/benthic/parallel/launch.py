"""How ranks meet, and what they check before they trust each other."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benthic.common.errors import ConfigError, PeerLost
from benthic.common.version import __version__
from benthic.parallel.collectives import Collectives, forward_group
from benthic.parallel.control import Alone, Control, GroupControl
from benthic.parallel.layout import SINGLE, ParallelLayout

MEET_S = 300.0  # for all ranks to have started
LOAD_S = 3600.0  # between two meetings while weights are read and memory is brought in
EXCHANGE_S = 120.0  # in a forward: above the longest
FRAME_S = 3600.0  # between schedulers: beats find a rank that hangs long before; a paused server must not end by this


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place and its three ways to the others, each for one thread: `start` while the engine is built,
    `control` for the scheduler's, `group` for the runner's (None: there are no others)."""

    layout: ParallelLayout
    start: Control
    control: Control
    group: Collectives | None

    def barrier(self) -> None:
        """Wait for all ranks; while the engine is built."""
        self.start.min_reduce([0])

    def least(self, value: int) -> int:
        """The least `value` of any rank; while the engine is built."""
        return self.start.min_reduce([value])[0]


ALONE = Ranks(SINGLE, Alone(), Alone(), None)


def meet(layout: ParallelLayout, rendezvous: str, device: torch.device) -> Ranks:
    """Join the other ranks at `rendezvous`: file:///path (a FileStore of one host) or env:// (torchrun's variables).

    The forward's exchanges run over NCCL where each rank has a GPU of its own, else over gloo. Raises PeerLost.
    """
    if layout.world_size == 1:
        return ALONE
    if layout.local_size == layout.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not lead anywhere
    where: dict[str, Any]
    if rendezvous.startswith("file://"):
        path = rendezvous.removeprefix("file://")
        where = {"store": dist.FileStore(path, layout.world_size)}  # type: ignore[attr-defined]  # not in the stubs
    else:
        where = {"init_method": rendezvous}
    own_gpu = device.type == "cuda" and layout.local_size <= torch.cuda.device_count()
    try:
        dist.init_process_group(
            "gloo",
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=MEET_S),
            **where,
        )
        start = GroupControl(dist.new_group(backend="gloo", timeout=timedelta(seconds=LOAD_S)))
        control = GroupControl(dist.new_group(backend="gloo", timeout=timedelta(seconds=FRAME_S)))
        # hosts may differ in their GPUs, and all ranks must take the same
        nccl = bool(start.min_reduce([int(own_gpu)])[0])
        group = forward_group("nccl" if nccl else "gloo", EXCHANGE_S)
    except RuntimeError as error:
        raise PeerLost(f"{layout.name} has not met the {layout.world_size - 1} others: {error}") from error
    return Ranks(layout, start, control, group)


def part() -> None:
    """Leave the groups; the process is about to end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def versions() -> dict[str, str]:
    """What must be the same in every rank's process."""
    return {"benthic": __version__, "torch": str(torch.__version__), "Python": platform.python_version()}


def compare(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Check that every rank states the same `facts`. Raises ConfigError with both values on a rank that differs."""
    if ranks.layout.world_size == 1:
        return
    own = dict(facts)
    told = ranks.start.share(msgspec.json.encode(own) if ranks.layout.leads else None)
    first = msgspec.json.decode(told, type=dict[str, str])
    differing = [name for name in sorted(first.keys() | own.keys()) if first.get(name) != own.get(name)]
    if differing:
        shown = "; ".join(
            f"{name}: {own.get(name, 'none')} here, {first.get(name, 'none')} there" for name in differing
        )
        raise ConfigError(
            f"{ranks.layout.name} differs from rank 0 in {shown}; start all ranks from the same installation, with the "
            f"same flags and files"
        )
