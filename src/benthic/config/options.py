"""The options as a user gives them: one table that makes the flags of `benthic serve`, the keys of `--config FILE` and
the keyword arguments of `LLM(...)`. A value is None until somebody gives it."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any

from benthic.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `kind` is what the command line parses.

    Str, int, float (sizes and lists are strings, parsed later), or bool: a flag without a value.
    """

    name: str  # Python name; the flag is `--` + name with dashes
    kind: type
    group: str
    help: str
    example: str
    server_only: bool = False  # not an argument of LLM(...)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def usage(self) -> str:
        """The flag as one may type it."""
        return self.flag if self.kind is bool else f"{self.flag} {self.example}"


_MODEL, _CACHE, _SCHED, _RUN, _HTTP, _PARALLEL = "Model", "Cache", "Scheduling", "Runner", "Server", "Parallel"

OPTIONS: tuple[Option, ...] = (
    Option("host", str, _HTTP, "Address to listen on; any but the default 127.0.0.1 lets others in.", "0.0.0.0", True),
    Option("port", int, _HTTP, "TCP port; 0 takes a free one and prints it. Default 8000.", "8080", True),
    Option("served_model_name", str, _HTTP, "Name in /v1/models and in requests. Default: MODEL.", "my-model", True),
    Option("api_key", str, _HTTP, "Clients must send it as a bearer token. Also from BENTHIC_API_KEY.", "s3cret", True),
    Option("grace_s", float, _HTTP, "Seconds that requests and writes to disk get at SIGTERM. Default 30.", "10", True),
    Option("device", str, _MODEL, "auto (default), cpu or cuda. auto takes a GPU where there is one.", "cpu"),
    Option("dtype", str, _MODEL, "auto (default), float32, bfloat16 or float16: arithmetic and weights.", "float32"),
    Option("kv_dtype", str, _MODEL, "auto (default), model, fp8, a dtype, or target=…,index=… of these.", "fp8"),
    Option("max_context", int, _MODEL, "Tokens of a request at most, answer included; the model's own.", "4096"),
    Option("seed", int, _MODEL, "Seed for requests that bring none. Default: drawn at start.", "1"),
    Option("page_size", int, _CACHE, "Tokens a page: the unit of caching. A power of two; default 64.", "16"),
    Option("l1_size", str, _CACHE, "Device memory for the KV cache, per rank. Default: from free memory.", "8GiB"),
    Option("l1_pages", int, _CACHE, "The same in pages; give one of the two.", "1000"),
    Option("l1_free_pages", int, _CACHE, "Pages that background eviction keeps free in each lane.", "8"),
    Option("l2_size", str, _CACHE, "Host memory for the KV cache, per host. Default: no host tier.", "64GiB"),
    Option("l2_policy", str, _CACHE, "write_through (default), write_through_selective or write_back.", "write_back"),
    Option("l2_backing", str, _CACHE, "auto (default), shm or hugetlbfs[:MOUNT].", "hugetlbfs:/dev/hugepages"),
    Option("l3_dir", str, _CACHE, "Folder of the disk floor, which outlives restarts. Needs --l2-size.", "/data/kv"),
    Option("l3_size", str, _CACHE, "What the disk floor may take there, index included, per host.", "200GiB"),
    Option("l3_config", str, _CACHE, "TOML or JSON file for several disks, in place of the two.", "floor.toml"),
    Option("l3_cold_start", str, _CACHE, "load (default) finds what is on disk; clear forgets it.", "clear"),
    Option("l3_min_pages", int, _CACHE, "A missing part with fewer whole pages is computed. Default 1.", "4"),
    Option("chunk_tokens", int, _SCHED, "Prefill tokens a tick, in pages. Default: 256 (CPU), 8192 (GPU).", "2048"),
    Option("max_running", int, _SCHED, "Requests in one batch at most. Default: 64 on a CPU, 256 on a GPU.", "64"),
    Option("max_queue", int, _SCHED, "Requests that may wait; beyond it clients get 429. Default 1024.", "200"),
    Option("queue_timeout", float, _SCHED, "Seconds that a request may wait before 503. Default 0: no bound.", "60"),
    Option("cp", int, _PARALLEL, "Ranks that share each prompt's tokens and the KV cache's pages. Default 1.", "2"),
    Option("tp", int, _PARALLEL, "Ranks that share each layer's heads; give one of --cp and --tp. Default 1.", "2"),
    Option("ep", bool, _PARALLEL, "Spread routed experts over the ranks, in place of all on each.", "true"),
    Option("expert_dispatch", str, _PARALLEL, "How tokens reach spread experts: allgather (default).", "allgather"),
    Option("attention_backend", str, _RUN, "torch or triton (GPU), or prefill=NAME,decode=NAME.", "triton"),
    Option("graph_batch_sizes", str, _RUN, "Decode batch sizes to capture, with commas; `none`: no graphs.", "1,2,4,8"),
    Option("graph_prefill_tokens", int, _RUN, "Steps up to so many tokens run prompts in graphs too (GPU: 256).", "64"),
    Option("profile_graph_memory", str, _RUN, "Folder for one memory snapshot a graph family (CUDA).", "./graphs"),
    Option("log_level", str, _RUN, "debug, info (default), warning or error.", "debug"),
)  # fmt: skip

Options = make_dataclass(
    "Options",
    [("model", str | None, None), *((o.name, o.kind | None, None) for o in OPTIONS)],
    frozen=True,
    slots=True,
    kw_only=True,
)
Options.__doc__ = "What the user gave, by option name; None: not given."


def options_from_mapping(values: Mapping[str, Any], source: str) -> Any:
    """Options from a file's or a caller's keys (dashes or underscores).

    Raises ConfigError on an unknown key or wrong type.
    """
    known = {o.name: o for o in OPTIONS}
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name == "model":
            parsed[name] = str(value)
            continue
        if name not in known:
            raise ConfigError(f"{source}: unknown option {key!r}; known: {', '.join(sorted(known))}")
        parsed[name] = None if value is None else _convert(known[name], value, source)
    return Options(**parsed)


def _convert(option: Option, value: Any, source: str) -> Any:
    if option.kind is str:
        return ",".join(str(v) for v in value) if isinstance(value, list | tuple) else str(value)
    if option.kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: {option.name} must be true or false, not {value!r}")
        return value
    if isinstance(value, bool):
        raise ConfigError(f"{source}: {option.name} must be a number, e.g. {option.example}, not {value!r}")
    try:
        if option.kind is int and float(value) != int(value):
            raise ValueError
        return option.kind(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{source}: {option.name} must be a{'n integer' if option.kind is int else ' number'}, "
            f"e.g. {option.example}, not {value!r}"
        ) from None


def read_config_file(path: Path) -> Any:
    """Options from a TOML or JSON file (by its ending). Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: can't be read: {error}") from None
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid {path.suffix.lstrip('.').upper() or 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected a table of options, found {type(values).__name__}")
    return options_from_mapping(values, f"--config {path}")


def merge(first: Any, second: Any) -> Any:
    """`first` where given, else `second`: flags before the file."""
    return Options(
        **{
            f.name: getattr(second, f.name) if getattr(first, f.name) is None else getattr(first, f.name)
            for f in fields(Options)
        }
    )
