"""A machine with whatever memory a test wants, for host slabs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benthic.common.units import GIB
from benthic.tiers.host.pools import HugepagePool, MemoryLimit, Mount, Room
from benthic.tiers.host.slabs import HostSlabs, SlabGeometry


@dataclass
class FakePools:
    """Implements tiers.host.pools.HostPools. `folder` stands for /dev/shm; slabs made there are ordinary files."""

    folder: Path
    rooms: dict[str, Room | None] = field(default_factory=dict)  # by folder; others: no limit
    huge: tuple[HugepagePool, ...] = ()
    mounted: tuple[Mount, ...] = ()
    read_only: tuple[str, ...] = ()
    available: int = 64 * GIB
    limit: MemoryLimit | None = None

    def shm_folder(self) -> str:
        return str(self.folder)

    def hugepages(self) -> Sequence[HugepagePool]:
        return self.huge

    def mounts(self) -> Sequence[Mount]:
        return self.mounted

    def room(self, path: str) -> Room | None:
        return self.rooms.get(path)

    def writable(self, path: str) -> bool:
        return path not in self.read_only

    def available_bytes(self) -> int:
        return self.available

    def memory_limit(self) -> MemoryLimit | None:
        return self.limit


def small_slabs(folder: Path, frame_bytes: int, frames: int, *, per_slab: int | None = None) -> HostSlabs:
    """Slabs of one rank in ordinary files, brought in; `per_slab` frames a slab."""
    bound = frame_bytes * (per_slab or frames)
    geometry = SlabGeometry(frame_bytes=frame_bytes, frames_per_lane=frames, num_owners=1, max_slab_bytes=bound)
    slabs = HostSlabs.open(geometry, pools=FakePools(folder))
    slabs.fault_in()
    return slabs
