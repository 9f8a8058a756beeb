"""From what the user gave to a validated, frozen Config.

Everything that can be refused without loading anything is refused here.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benthic.common.errors import ConfigError
from benthic.config.cache_options import resolve_cache
from benthic.config.checks import at_least, one_of, optional_at_least
from benthic.config.kv_dtype import parse_kv_dtype
from benthic.config.parallel_options import resolve_parallel
from benthic.config.settings import (
    BackendNames,
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


def resolve(options: Any, environ: Mapping[str, str] = os.environ) -> Config:
    """The Config for `options`. Raises ConfigError that names the flag, the value and what would do."""
    cache = resolve_cache(options, environ)
    page_size = cache.page_size
    chunk_tokens = optional_at_least(options.chunk_tokens, 1, "--chunk-tokens")
    if chunk_tokens is not None and chunk_tokens % page_size:
        raise ConfigError(
            f"--chunk-tokens {chunk_tokens}: must be whole pages of {page_size} tokens; "
            f"take {max(1, chunk_tokens // page_size) * page_size}"
        )
    engine = EngineConfig(
        model=ModelConfig(
            model=options.model or DEFAULT_MODEL,
            dtype=one_of(options.dtype, "auto", _DTYPES, "--dtype"),
            kv_dtype=parse_kv_dtype(options.kv_dtype),
            device=one_of(options.device, "auto", _DEVICES, "--device"),
            max_context=optional_at_least(options.max_context, 2, "--max-context"),
            seed=secrets.randbits(32) if options.seed is None else options.seed,
        ),
        cache=cache,
        scheduler=SchedulerConfig(
            chunk_tokens=chunk_tokens,
            max_running=optional_at_least(options.max_running, 1, "--max-running"),
            max_queue=at_least(options.max_queue, 1024, 1, "--max-queue"),
            queue_timeout_s=at_least(options.queue_timeout, 0.0, 0.0, "--queue-timeout"),
        ),
        runner=RunnerConfig(
            attention_backend=_backends(options.attention_backend),
            graph_batch_sizes=_batch_sizes(options.graph_batch_sizes),
            graph_prefill_tokens=optional_at_least(options.graph_prefill_tokens, 0, "--graph-prefill-tokens"),
            profile_graph_memory=None if options.profile_graph_memory is None else Path(options.profile_graph_memory),
            log_graph_buffers=environ.get("BENTHIC_LOG_GRAPH_BUFFERS", "0") not in ("", "0"),
        ),
        parallel=resolve_parallel(options),
        log_level=one_of(options.log_level, "info", _LOG_LEVELS, "--log-level"),
    )
    port = 8000 if options.port is None else options.port
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be from 0 (take a free one) to 65535")
    server = ServerConfig(
        host=options.host or "127.0.0.1",
        port=port,
        served_model_name=options.served_model_name,
        api_key=options.api_key or environ.get("BENTHIC_API_KEY") or None,
        grace_s=at_least(options.grace_s, 30.0, 0.0, "--grace-s"),
        log_level=engine.log_level,
    )
    return Config(engine=engine, server=server)


def _backends(text: str | None) -> BackendNames:
    """NAME for both uses, or `prefill=NAME,decode=NAME`, where either may be left out."""
    flag = "--attention-backend"
    if text is None:
        return BackendNames()
    if "=" not in text:
        name = one_of(text.strip(), "", _BACKENDS, flag)
        return BackendNames(prefill=name, decode=name)
    names: dict[str, str] = {}
    for pair in text.split(","):
        use, _, name = (piece.strip() for piece in pair.partition("="))
        if use not in ("prefill", "decode") or use in names:
            raise ConfigError(f"{flag} {text}: write one name, or prefill=NAME,decode=NAME, each at most once")
        names[use] = one_of(name, "", _BACKENDS, f"{flag} {use}=")
    return BackendNames(**names)


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
