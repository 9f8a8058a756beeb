"""The cache's options: which tiers there are, how large, and which flags make no sense without another."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benthic.common.errors import ConfigError
from benthic.common.units import GIB
from benthic.config.checks import at_least, one_of, optional_at_least, positive_size
from benthic.config.disk import DiskConfig
from benthic.config.disk_file import read_disk_config, simple_disk_config
from benthic.config.settings import CacheConfig

L2_POLICIES = ("write_through", "write_through_selective", "write_back")
COLD_STARTS = ("load", "clear")
_L2_FLAGS = ("l2_policy", "l2_backing")
_L3_FLAGS = ("l3_dir", "l3_size", "l3_config", "l3_cold_start", "l3_min_pages")


def resolve_cache(options: Any, environ: Mapping[str, str]) -> CacheConfig:
    """The tiers that `options` ask for. Raises ConfigError that names the flag to change or to add."""
    if options.l1_size is not None and options.l1_pages is not None:
        raise ConfigError("--l1-size and --l1-pages say the same thing in two units; give one of them")
    page_size = at_least(options.page_size, 64, 1, "--page-size")
    if page_size & (page_size - 1):
        raise ConfigError(f"--page-size {page_size}: must be a power of two, e.g. 64")
    if options.l2_size is None:
        _refuse_without_l2(options)
    return CacheConfig(
        page_size=page_size,
        l1_bytes=None if options.l1_size is None else positive_size(options.l1_size, "--l1-size"),
        l1_pages=optional_at_least(options.l1_pages, 2, "--l1-pages"),
        l1_free_pages=optional_at_least(options.l1_free_pages, 0, "--l1-free-pages"),
        l2_bytes=0 if options.l2_size is None else positive_size(options.l2_size, "--l2-size"),
        l2_policy=_policy(options.l2_policy),
        l2_backing=_backing(options.l2_backing),
        max_slab_bytes=_max_slab_bytes(environ),
        placement_assert=environ.get("BENTHIC_PLACEMENT_ASSERT", "0") not in ("", "0"),
        disk=_disk(options),
    )


def _refuse_without_l2(options: Any) -> None:
    if given := _first_given(options, _L3_FLAGS):
        raise ConfigError(f"{given} needs a host tier: L3 is filled from L2; add --l2-size, e.g. --l2-size 64GiB")
    if given := _first_given(options, _L2_FLAGS):
        raise ConfigError(f"{given} says how the host tier works, and there is none; add --l2-size, e.g. 64GiB")


def _first_given(options: Any, names: tuple[str, ...]) -> str | None:
    for name in names:
        if getattr(options, name) is not None:
            return "--" + name.replace("_", "-")
    return None


def _policy(value: str | None) -> str:
    if value is not None:
        value = value.replace("-", "_")
    return one_of(value, "write_through", L2_POLICIES, "--l2-policy")


def _backing(value: str | None) -> str:
    """`auto`, `shm`, `hugetlbfs`, or `hugetlbfs:` and an absolute path."""
    kind, colon, mount = (value or "auto").partition(":")
    if kind not in ("auto", "shm", "hugetlbfs") or (colon and (kind != "hugetlbfs" or not mount.startswith("/"))):
        raise ConfigError(
            f"--l2-backing {value}: must be auto, shm, hugetlbfs, or hugetlbfs:MOUNT with the mount's path, "
            "e.g. hugetlbfs:/dev/hugepages"
        )
    return value or "auto"


def _max_slab_bytes(environ: Mapping[str, str]) -> int:
    text = environ.get("BENTHIC_MAX_SLAB_GIB") or "480"  # one cudaHostRegister over about 1 TB fails
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise ConfigError(f"BENTHIC_MAX_SLAB_GIB={text}: must be a number of GiB above 0, e.g. 480")
    return int(gib * GIB)


def _disk(options: Any) -> DiskConfig | None:
    folder, size, file = options.l3_dir, options.l3_size, options.l3_config
    own = _first_given(options, ("l3_dir", "l3_size"))
    if file is not None and own is not None:
        raise ConfigError(
            f"{own} beside --l3-config {file}: the file names the disks and their sizes; give one of them"
        )
    if folder is not None and size is None:
        raise ConfigError(
            f"--l3-dir {folder}: also say how much it may take there; add --l3-size, e.g. --l3-size 200GiB"
        )
    if size is not None and folder is None:
        raise ConfigError(f"--l3-size {size}: also say where; add --l3-dir, e.g. --l3-dir /data/kv")
    if file is not None:
        disk = read_disk_config(Path(file))
    elif folder is not None:
        disk = simple_disk_config(Path(folder), positive_size(size, "--l3-size"))
    elif (given := _first_given(options, _L3_FLAGS)) is not None:
        raise ConfigError(f"{given} is about the disk floor, and there is none; add --l3-dir and --l3-size")
    else:
        return None
    chosen: dict[str, Any] = {}
    if options.l3_cold_start is not None:
        chosen["cold_start"] = one_of(options.l3_cold_start, "load", COLD_STARTS, "--l3-cold-start")
    if options.l3_min_pages is not None:
        chosen["min_pages"] = at_least(options.l3_min_pages, 1, 1, "--l3-min-pages")
    return replace(disk, **chosen)
