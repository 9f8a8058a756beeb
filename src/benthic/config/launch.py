"""Whether torchrun started this process as one of an engine's ranks, and as which: its environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass

from benthic.common.errors import ConfigError
from benthic.config.settings import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process's place among those that torchrun started. Rank 0 is the server, with the engine's rank 0 as its
    child; each other process is an engine rank itself."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int  # processes of this host
    master_addr: str  # rank 0's host, as the others reach it

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.world_size


def read_launch(engine: EngineConfig, environ: Mapping[str, str]) -> Launch | None:
    """None: nobody but us starts the ranks. Raises ConfigError where torchrun started other ranks than asked for, or
    where ranks of several hosts can't do what was asked for."""
    parallel = engine.parallel
    if parallel.world_size == 1 or "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    launch = Launch(
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK"),
        local_size=_number(environ, "LOCAL_WORLD_SIZE"),
        master_addr=environ.get("MASTER_ADDR", ""),
    )
    if launch.world_size != parallel.world_size:
        raise ConfigError(
            f"{parallel.flag} asks for {parallel.world_size} ranks and WORLD_SIZE={launch.world_size} says that a "
            f"launcher started {launch.world_size}; start as many with torchrun (--nproc-per-node), or unset RANK and "
            f"WORLD_SIZE and one command starts all ranks of this host"
        )
    if launch.one_host:
        return launch
    if engine.cache.disk is not None:
        raise ConfigError(
            f"the disk floor (--l3-dir, --l3-config) can't span hosts yet, and {launch.local_size} of "
            f"{launch.world_size} ranks are on this one; leave it out, or start all ranks on one host"
        )
    if not launch.master_addr:
        raise ConfigError("ranks on several hosts need MASTER_ADDR, rank 0's host; torchrun sets it (--rdzv-endpoint)")
    return launch


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text}: must be a number where RANK and WORLD_SIZE are set; torchrun sets all of them. Unset RANK "
            f"and WORLD_SIZE and one command starts all ranks of this host"
        )
    return int(text)
