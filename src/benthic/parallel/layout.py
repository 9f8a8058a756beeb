"""Who this rank is among the others: the only arithmetic on ranks, but for a page's owner (`common.layout`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """The sizes, equal on every rank, and this rank's place.

    Context parallelism shares a prefill's tokens and the cache's pages, tensor parallelism the heads of each layer; one
    of the two is 1. `local_*` count the ranks of this host, which share its memory and its disks.
    """

    rank: int = 0
    cp_size: int = 1
    tp_size: int = 1
    expert_parallel: bool = False
    local_rank: int = 0
    local_size: int = 1

    def __post_init__(self) -> None:
        assert self.cp_size == 1 or self.tp_size == 1
        assert 0 <= self.rank < self.world_size
        assert 0 <= self.local_rank < self.local_size <= self.world_size

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.cp_size * self.tp_size

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the server, keeps the clock and samples: the first of TP and of CP."""
        return self.rank == 0

    @property
    def cp_rank(self) -> int:
        """Which lane of the cache this rank keeps, and which segments it computes."""
        return self.rank if self.cp_size > 1 else 0

    @property
    def tp_rank(self) -> int:
        """Which heads this rank computes and keeps."""
        return self.rank if self.tp_size > 1 else 0

    @property
    def ep_size(self) -> int:
        """Over how many ranks the routed experts are spread."""
        return self.world_size if self.expert_parallel else 1

    @property
    def ep_rank(self) -> int:
        """Which share of the routed experts this rank holds."""
        return self.rank if self.expert_parallel else 0

    @property
    def name(self) -> str:
        """For logs and errors."""
        return f"rank {self.rank}"


SINGLE = ParallelLayout()
