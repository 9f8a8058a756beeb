"""The one configuration: parsed once (flags, file, environment), validated once, frozen, handed down in pieces."""

from benthic.config.disk import DiskConfig, DiskSpec
from benthic.config.options import OPTIONS, Option, Options, options_from_mapping, read_config_file
from benthic.config.resolve import resolve
from benthic.config.settings import (
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
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
    "ModelConfig",
    "Option",
    "Options",
    "RunnerConfig",
    "SchedulerConfig",
    "ServerConfig",
    "options_from_mapping",
    "read_config_file",
    "resolve",
]
