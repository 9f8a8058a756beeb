"""The disks of all ranks: rank 0's own come in its messages, the others' in a message of their own each second."""

from collections.abc import Sequence

from benthic.messages import DiskStats, RankStats


class RankDisks:
    """Owns the newest disks of every rank but the first."""

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[DiskStats, ...]] = {}

    def update(self, stats: RankStats) -> None:
        """Take a rank's newest."""
        self._by_rank[stats.rank] = stats.disks

    def beside(self, disks: Sequence[DiskStats]) -> tuple[DiskStats, ...]:
        """`disks` and those of the ranks that have none among them, in the order of ranks."""
        told = {disk.rank for disk in disks}
        others = [disk for rank, own in self._by_rank.items() if rank not in told for disk in own]
        return tuple(sorted((*disks, *others), key=lambda disk: disk.rank))
