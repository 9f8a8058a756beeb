"""The frozen configuration that parts receive. `None` means: derived from the machine and the model by the engine,
which prints the value and the reason in the start-up table."""

from dataclasses import dataclass, field
from pathlib import Path

from benthic.common.units import GIB
from benthic.config.disk import DiskConfig
from benthic.config.kv_dtype import KVDtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights, and in what arithmetic."""

    model: str  # built-in name, GGUF file, checkpoint folder or hub id, as the user wrote it
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    device: str = "auto"  # auto | cpu | cuda
    kv_dtype: KVDtypes = field(default_factory=KVDtypes)
    max_context: int | None = None  # tokens of one request at most; the model's own limit where left out
    seed: int = 0  # of requests that bring none


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache's tiers."""

    page_size: int = 64  # tokens
    l1_bytes: int | None = None  # per rank; at most one of bytes and pages is given
    l1_pages: int | None = None
    l1_free_pages: int | None = None  # per lane: what background eviction keeps free
    l2_bytes: int = 0  # per host; 0: no host tier
    l2_policy: str = "write_through"  # write_through | write_through_selective | write_back
    l2_backing: str = "auto"  # auto | shm | hugetlbfs | hugetlbfs:MOUNT
    max_slab_bytes: int = 480 * GIB  # BENTHIC_MAX_SLAB_GIB: of one mapping that is registered with the device
    placement_assert: bool = False  # BENTHIC_PLACEMENT_ASSERT: compare the ranks' digests every tick
    disk: DiskConfig | None = None  # None: no disk floor; never without l2_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Admission and batching."""

    chunk_tokens: int | None = None  # prefill tokens a tick
    max_running: int | None = None  # requests in the batch at most
    max_queue: int = 1024  # requests waiting at most; beyond: 429
    queue_timeout_s: float = 0.0  # a request that waited this long for its first admission gets 503; 0: no bound


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendNames:
    """Attention backends by name; None: the best one is chosen."""

    prefill: str | None = None  # of steps with prefill rows
    decode: str | None = None  # of steps that only decode


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How forward passes run."""

    attention_backend: BackendNames = field(default_factory=BackendNames)
    graph_batch_sizes: tuple[int, ...] | None = None  # rising; () turns decode graphs off
    graph_prefill_tokens: int | None = None  # of a step that runs in a graph, prompts and all; None: the device's
    profile_graph_memory: Path | None = None
    log_graph_buffers: bool = False  # BENTHIC_LOG_GRAPH_BUFFERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Over how many ranks an engine runs; at most one of the two sizes is above 1."""

    cp_size: int = 1
    tp_size: int = 1
    expert_parallel: bool = False  # the routed experts are spread over the ranks
    expert_dispatch: str = "allgather"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.cp_size * self.tp_size

    @property
    def flag(self) -> str:
        """The option that asks for several ranks, for messages."""
        return f"--cp {self.cp_size}" if self.cp_size > 1 else f"--tp {self.tp_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    grace_s: float = 30.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine process gets: everything but the HTTP side."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    runner: RunnerConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, validated."""

    engine: EngineConfig
    server: ServerConfig
