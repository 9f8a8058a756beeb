"""The disk floor's configuration as users write it: `--l3-config FILE`, or the simple flags.

The file is TOML, or JSON by its ending. Sizes are numbers of bytes or text like "200GiB". Only `disks` must be there:

    disks                list of tables, each with `path` and `size`: that folder, and the most that one model's
                         files may take there, index included
    rank_disks           list: the disk's number in `disks` for each rank (default: rank modulo number of disks)
    index_dir            folder for the indexes (default: beside the slab)
    index_size           size of each rank's index map (default: from the number of slots)
    cold_start           "load" (default) or "clear": what becomes of the pages that an earlier run left
    min_pages            a missing suffix of fewer pages is computed (default 1)
    spill_min_hits       spill only what was hit so often (default 0)
    require_plp          true: refuse a disk without power-loss protection (default false)
    staging_size         buffers between host memory and disk, per rank (default 256MiB, or 64 pages where that is more)
    spill_max_inflight   spill operations under way (default 64)
    reload_max_inflight  reload operations under way (default 8)
    reload_timeout_s     base of every deadline, in seconds (default 2)
    queue_depth          transfers under way per disk (default 8)
    collect_start        share of slots in use at which collecting starts (default 0.90) …
    collect_stop         … and at which it stops (default 0.85)
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benthic.common.errors import ConfigError
from benthic.common.units import parse_size
from benthic.config.disk import DiskConfig, DiskSpec


def read_disk_config(file: Path) -> DiskConfig:
    """The configuration in a TOML or JSON file. Raises ConfigError that names file, key and what was expected."""
    source = f"--l3-config {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: can't be read: {error}") from None
    is_json = file.suffix == ".json"
    try:
        values = json.loads(text) if is_json else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{source}: not valid {'JSON' if is_json else 'TOML'}: {error}") from None
    try:
        return parse_disk_config(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def simple_disk_config(
    path: Path,
    size: str | int,
    *,
    cold_start: str = "load",
    min_pages: int = 1,
    spill_min_hits: int = 0,
    require_plp: bool = False,
) -> DiskConfig:
    """The configuration of the simple flags: one folder and its size, e.g. `200GiB`. Raises ConfigError."""
    return DiskConfig(
        disks=(DiskSpec(path=_absolute(path), budget_bytes=parse_size(size, "--l3-size")),),
        cold_start=cold_start,
        min_pages=min_pages,
        spill_min_hits=spill_min_hits,
        require_plp=require_plp,
    )


def parse_disk_config(values: Any) -> DiskConfig:
    """The configuration in a table of values. Raises ConfigError for an unknown key, a wrong type or range."""
    table = _table(values, "the file")
    known = {**_KEYS, "disks": ("disks", _disks)}
    _refuse_unknown(table, known, "the file")
    if "disks" not in table:
        raise ConfigError('disks is missing; expected e.g. disks = [{path = "/ssd0/benthic", size = "200GiB"}]')
    return DiskConfig(**{known[key][0]: known[key][1](key, value) for key, value in table.items()})


def _disks(key: str, value: Any) -> tuple[DiskSpec, ...]:
    specs = []
    for number, entry in enumerate(_list(key, value)):
        where = f"{key}[{number}]"
        table = _table(entry, where)
        _refuse_unknown(table, ("path", "size"), where)
        missing = {"path", "size"} - table.keys()
        if missing:
            raise ConfigError(f"{where}: {' and '.join(sorted(missing))} missing; expected path and size")
        size = _size(f"{where}.size", table["size"])
        specs.append(DiskSpec(path=_path(f"{where}.path", table["path"]), budget_bytes=size))
    return tuple(specs)


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{key}: expected a list, not {value!r}")
    return value


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a table, not {value!r}")
    return value


def _refuse_unknown(table: dict[str, Any], known: Any, where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; known: {', '.join(sorted(known))}")


def _size(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f'{key}: expected a size, e.g. "64GiB", not {value!r}')
    return parse_size(value, key)


def _path(key: str, value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: expected a folder's path, not {value!r}")
    return _absolute(Path(value))


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key}: expected text, not {value!r}")
    return value


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: expected true or false, not {value!r}")
    return value


def _integer(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}: expected a whole number, not {value!r}")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}: expected a number, not {value!r}")
    return float(value)


def _integers(key: str, value: Any) -> tuple[int, ...]:
    return tuple(_integer(f"{key}[{number}]", entry) for number, entry in enumerate(_list(key, value)))


_KEYS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {  # key in the file → field and parser
    "rank_disks": ("rank_disks", _integers),
    "index_dir": ("index_dir", _path),
    "index_size": ("index_bytes", _size),
    "cold_start": ("cold_start", _text),
    "min_pages": ("min_pages", _integer),
    "spill_min_hits": ("spill_min_hits", _integer),
    "require_plp": ("require_plp", _flag),
    "staging_size": ("staging_bytes", _size),
    "spill_max_inflight": ("spill_max_inflight", _integer),
    "reload_max_inflight": ("reload_max_inflight", _integer),
    "reload_timeout_s": ("reload_timeout_s", _number),
    "queue_depth": ("queue_depth", _integer),
    "collect_start": ("collect_start", _number),
    "collect_stop": ("collect_stop", _number),
}
