"""L1: a pool in device memory for each payload, and whether they fit together.

    pool [the payload's layers, pages + 1, *slice]     a page has the same index in each pool; the last one is scratch

Padded rows of a decode graph write to the scratch page; no request ever owns it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]  # has no stubs
import torch

from benthic.attention.payload import Payload
from benthic.common.errors import CapacityError
from benthic.common.units import format_size

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMITS = (  # limit, usage, and the statistics with the key of file cache that goes when memory is wanted
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def bytes_per_page(payloads: Iterable[Payload]) -> int:
    """Bytes of one page in L1."""
    return sum(payload.page_bytes for payload in payloads)


def available_memory(device: torch.device, cgroup: Path = _CGROUP) -> int:
    """Free bytes of the device; on a CPU what the system or, where it is less, the container's limit leaves."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # what torch holds in reserve but does not use can be given out too
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = int(psutil.virtual_memory().available)
    for limit_name, usage_name, statistics_name, cache_key in _CGROUP_LIMITS:
        limit, usage = _read_number(cgroup / limit_name), _read_number(cgroup / usage_name)
        if limit is not None and usage is not None:
            # a checkpoint that has just been read counts as used, but is only cached
            cache = _read_statistic(cgroup / statistics_name, cache_key)
            available = min(available, max(0, limit - max(0, usage - cache)))
    return available


def demand_room(num_pages: int, page: int, device: torch.device, available: int) -> int:
    """Bytes of the pools for `num_pages` pages of `page` bytes and the scratch page.

    Raises CapacityError when `available` bytes do not hold it.
    """
    need = page * (num_pages + 1)
    if need > available:
        raise _too_large(need, available, page, num_pages, device)
    return need


def allocate_pools(
    payloads: Sequence[Payload], num_pages: int, device: torch.device, *, available: int | None = None
) -> dict[str, torch.Tensor]:
    """The zeroed pools by payload name, for `num_pages` pages and the scratch page.

    `available` replaces what the machine says is free, in bytes. Raises CapacityError first where they do not fit.
    """
    page = bytes_per_page(payloads)
    have = available_memory(device) if available is None else available
    need = demand_room(num_pages, page, device, have)
    try:
        return {payload.name: _zeros(payload, num_pages + 1, device) for payload in payloads}
    except (torch.OutOfMemoryError, RuntimeError, MemoryError):
        raise _too_large(need, have, page, num_pages, device) from None


def _zeros(payload: Payload, num_pages: int, device: torch.device) -> torch.Tensor:
    """Zeros, not just memory: what lies behind a row's end is masked, but a NaN there would get through."""
    shape = (len(payload.layers), num_pages, *payload.slice_shape)
    if device.type == "cpu":  # calloc: a page costs time and memory once it is written, not at start
        return torch.from_numpy(np.zeros(payload.page_bytes * num_pages, np.uint8)).view(payload.dtype).view(shape)
    return torch.zeros(shape, dtype=payload.dtype, device=device)


def _too_large(need: int, have: int, page: int, num_pages: int, device: torch.device) -> CapacityError:
    fits = max(0, have // page - 1)
    remedy = (
        f"at most {fits} would fit; lower --l1-pages or --l1-size" if fits else "free memory for at least two pages"
    )
    return CapacityError(
        f"L1 does not fit on {device}: {num_pages} pages and a scratch page of {format_size(page)} need "
        f"{format_size(need)}, {format_size(have)} free; {remedy}"
    )


def _read_statistic(path: Path, key: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    return next((int(value) for name, _, value in (line.partition(" ") for line in lines) if name == key), 0)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or "max"
        return None
