"""From what the user gave to a validated, frozen Config.

Everything that can be refused without loading anything is refused here.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from benthic.common.errors import ConfigError
from benthic.common.units import parse_size
from benthic.config.settings import (
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)

DEFAULT_MODEL = "smollm2-135m"
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_BACKENDS = ("torch", "triton")

T = TypeVar("T", int, float)


def resolve(options: Any, environ: Mapping[str, str] = os.environ) -> Config:
    """The Config for `options`. Raises ConfigError that names the flag, the value and what would do."""
    if options.l1_size is not None and options.l1_pages is not None:
        raise ConfigError("--l1-size and --l1-pages say the same thing in two units; give one of them")
    page_size = _at_least(options.page_size, 64, 1, "--page-size")
    if page_size & (page_size - 1):
        raise ConfigError(f"--page-size {page_size}: must be a power of two, e.g. 64")
    chunk_tokens = _optional_at_least(options.chunk_tokens, 1, "--chunk-tokens")
    if chunk_tokens is not None and chunk_tokens % page_size:
        raise ConfigError(
            f"--chunk-tokens {chunk_tokens}: must be whole pages of {page_size} tokens; "
            f"take {max(1, chunk_tokens // page_size) * page_size}"
        )
    engine = EngineConfig(
        model=ModelConfig(
            model=options.model or DEFAULT_MODEL,
            dtype=_one_of(options.dtype, "auto", _DTYPES, "--dtype"),
            device=_one_of(options.device, "auto", _DEVICES, "--device"),
            max_context=_optional_at_least(options.max_context, 2, "--max-context"),
            seed=secrets.randbits(32) if options.seed is None else options.seed,
        ),
        cache=CacheConfig(
            page_size=page_size,
            l1_bytes=None if options.l1_size is None else _positive_size(options.l1_size, "--l1-size"),
            l1_pages=_optional_at_least(options.l1_pages, 2, "--l1-pages"),
            l1_free_pages=_optional_at_least(options.l1_free_pages, 0, "--l1-free-pages"),
        ),
        scheduler=SchedulerConfig(
            chunk_tokens=chunk_tokens,
            max_running=_optional_at_least(options.max_running, 1, "--max-running"),
            max_queue=_at_least(options.max_queue, 1024, 1, "--max-queue"),
            queue_timeout_s=_at_least(options.queue_timeout, 0.0, 0.0, "--queue-timeout"),
        ),
        runner=RunnerConfig(
            attention_backend=None
            if options.attention_backend is None
            else _one_of(options.attention_backend, "", _BACKENDS, "--attention-backend"),
            graph_batch_sizes=_batch_sizes(options.graph_batch_sizes),
            profile_graph_memory=None if options.profile_graph_memory is None else Path(options.profile_graph_memory),
            log_graph_buffers=environ.get("BENTHIC_LOG_GRAPH_BUFFERS", "0") not in ("", "0"),
        ),
        log_level=_one_of(options.log_level, "info", _LOG_LEVELS, "--log-level"),
    )
    port = 8000 if options.port is None else options.port
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be from 0 (take a free one) to 65535")
    server = ServerConfig(
        host=options.host or "127.0.0.1",
        port=port,
        served_model_name=options.served_model_name,
        api_key=options.api_key or environ.get("BENTHIC_API_KEY") or None,
        grace_s=_at_least(options.grace_s, 30.0, 0.0, "--grace-s"),
        log_level=engine.log_level,
    )
    return Config(engine=engine, server=server)


def _one_of(value: str | None, default: str, allowed: tuple[str, ...], flag: str) -> str:
    if value is None:
        return default
    if value not in allowed:
        raise ConfigError(f"{flag} {value}: must be one of {', '.join(allowed)}")
    return value


def _at_least(value: T | None, default: T, least: T, flag: str) -> T:
    if value is None:
        return default
    if not value >= least:
        raise ConfigError(f"{flag} {value}: must be at least {least}")
    return value


def _optional_at_least(value: int | None, least: int, flag: str) -> int | None:
    return None if value is None else _at_least(value, least, least, flag)


def _positive_size(text: str, flag: str) -> int:
    size = parse_size(text, flag)
    if size <= 0:
        raise ConfigError(f"{flag} {text}: must be more than 0")
    return size


def _batch_sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text.strip().lower() == "none":
        return ()
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--graph-batch-sizes {text}: write numbers with commas, e.g. 1,2,4,8, or none") from None
    if sizes[0] < 1:
        raise ConfigError(f"--graph-batch-sizes {text}: every size must be at least 1")
    return sizes
