"""The one configuration: parsed once (flags, file, environment), validated once, frozen, handed down in pieces."""

from benthic.config.checks import demand_one_rank
from benthic.config.disk import DiskConfig, DiskSpec
from benthic.config.launch import Launch, read_launch
from benthic.config.options import OPTIONS, Option, Options, options_from_mapping, read_config_file
from benthic.config.resolve import resolve
from benthic.config.settings import (
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)

__all__ = [
    "OPTIONS",
    "CacheConfig",
    "Config",
    "DiskConfig",
    "DiskSpec",
    "EngineConfig",
    "Launch",
    "ModelConfig",
    "Option",
    "Options",
    "ParallelConfig",
    "RunnerConfig",
    "SchedulerConfig",
    "ServerConfig",
    "demand_one_rank",
    "options_from_mapping",
    "read_config_file",
    "read_launch",
    "resolve",
]
