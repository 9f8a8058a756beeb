"""Sizes that the user left out, derived from the machine and the model.

Each comes with its reason for the start-up table. Pure: what the machine offers enters as numbers.
"""

from dataclasses import dataclass

from benthic.common.errors import CapacityError, ConfigError
from benthic.common.layout import ceil_div
from benthic.common.units import GIB, format_size
from benthic.config import EngineConfig
from benthic.messages import Derived

CPU_CHUNK_TOKENS = 256  # keeps a tick of a small model under half a second on two cores
GPU_CHUNK_TOKENS = 8192
CPU_MAX_RUNNING = 64
GPU_MAX_RUNNING = 256
CPU_L1_SHARE, CPU_L1_MOST = 4, 4 * GIB  # a quarter of free memory, at most this
GPU_L1_PERCENT = 85  # of what the weights leave; the rest is for activations and graphs
LEAST_L1_PAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What sizes depend on."""

    on_gpu: bool
    available_bytes: int  # of the device, weights loaded
    bytes_per_page: int
    model_max_position: int
    num_lanes: int = 1  # ranks over which a sequence's pages are spread; pages and bytes here are of one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything decided, with the table's rows."""

    max_context: int
    max_request_tokens: int
    limit_reason: str
    chunk_tokens: int
    max_running: int
    l1_pages: int
    l1_free_pages: int
    table: tuple[Derived, ...]


def derive(config: EngineConfig, machine: Machine) -> Sizes:
    """Settle every size. Raises ConfigError and CapacityError with both numbers and the flag to change."""
    p = config.cache.page_size
    table: list[Derived] = []
    max_context = _max_context(config, machine, table)
    given = config.scheduler.max_running
    max_running = given or (GPU_MAX_RUNNING if machine.on_gpu else CPU_MAX_RUNNING)
    table.append(Derived("--max-running", str(max_running), "given" if given else f"default on a {_place(machine)}"))
    chunk = config.scheduler.chunk_tokens
    if chunk is None:
        chunk = max(p, (GPU_CHUNK_TOKENS if machine.on_gpu else CPU_CHUNK_TOKENS) // p * p)
        table.append(Derived("--chunk-tokens", str(chunk), f"keeps a tick under about 0.5 s on a {_place(machine)}"))
    else:
        table.append(Derived("--chunk-tokens", str(chunk), "given"))
    l1_pages = _l1_pages(config, machine, max_context, max_running, table)
    l1_free = config.cache.l1_free_pages
    if l1_free is None:
        l1_free = min(ceil_div(chunk, p), l1_pages // 4)
        table.append(Derived("--l1-free-pages", str(l1_free), "one prefill chunk, at most a quarter of L1"))
    elif l1_free >= l1_pages:
        raise ConfigError(
            f"--l1-free-pages {l1_free}: L1 has {l1_pages} pages; keep fewer free, or raise --l1-size or --l1-pages"
        )
    else:
        table.append(Derived("--l1-free-pages", str(l1_free), "given"))
    limit = min(max_context, l1_pages * machine.num_lanes * p)
    lanes = f" in each of {machine.num_lanes} lanes" if machine.num_lanes > 1 else ""
    reason = "--max-context" if limit == max_context else f"L1's {l1_pages} pages of {p} tokens{lanes}"
    table.append(Derived("request limit", f"{limit} tokens", f"prompt and answer together; set by {reason}"))
    return Sizes(
        max_context=max_context,
        max_request_tokens=limit,
        limit_reason=reason,
        chunk_tokens=chunk,
        max_running=max_running,
        l1_pages=l1_pages,
        l1_free_pages=l1_free,
        table=tuple(table),
    )


def _place(machine: Machine) -> str:
    return "GPU" if machine.on_gpu else "CPU"


def _max_context(config: EngineConfig, machine: Machine, table: list[Derived]) -> int:
    given = config.model.max_context
    if given is None:
        table.append(Derived("--max-context", f"{machine.model_max_position} tokens", "the model's own limit"))
        return machine.model_max_position
    if given > machine.model_max_position:
        raise ConfigError(
            f"--max-context {given}: the model was trained for {machine.model_max_position} positions; "
            "ask for at most that"
        )
    table.append(Derived("--max-context", f"{given} tokens", "given"))
    return given


def _l1_pages(config: EngineConfig, machine: Machine, max_context: int, max_running: int, table: list[Derived]) -> int:
    """Pages of L1 without the scratch page."""
    cache, page = config.cache, machine.bytes_per_page
    if cache.l1_pages is not None:
        pages, reason = cache.l1_pages, "given by --l1-pages"
    elif cache.l1_bytes is not None:
        pages, reason = cache.l1_bytes // page - 1, "given by --l1-size"
        if pages < LEAST_L1_PAGES:
            raise CapacityError(
                f"--l1-size {format_size(cache.l1_bytes)} holds {max(0, pages)} pages of {format_size(page)} "
                f"beside the scratch page; at least {LEAST_L1_PAGES} are needed: "
                f"{format_size((LEAST_L1_PAGES + 1) * page)}"
            )
    else:
        all_contexts = ceil_div(ceil_div(max_context, cache.page_size), machine.num_lanes) * max_running
        if machine.on_gpu:
            share = machine.available_bytes * GPU_L1_PERCENT // 100
            reason = f"{GPU_L1_PERCENT} % of the {format_size(machine.available_bytes)} that the weights leave"
        else:
            share = min(machine.available_bytes // CPU_L1_SHARE, CPU_L1_MOST)
            reason = f"a quarter of free memory, at most {format_size(CPU_L1_MOST)}"
        pages = share // page - 1
        if not machine.on_gpu and pages > all_contexts:
            pages, reason = all_contexts, f"{max_running} contexts of {max_context} tokens"
        if pages < LEAST_L1_PAGES:
            raise CapacityError(
                f"not enough memory for L1: {format_size(machine.available_bytes)} free, a page takes "
                f"{format_size(page)} and {LEAST_L1_PAGES + 1} are needed; free memory, or take "
                "a smaller --page-size or model"
            )
    each = f" a rank, {pages * machine.num_lanes} in all" if machine.num_lanes > 1 else ""
    table.append(Derived("L1", f"{pages} pages = {format_size(pages * page)}{each}", reason))
    return pages
