"""Where graph memory goes: the table of BENTHIC_LOG_GRAPH_BUFFERS and the snapshots of --profile-graph-memory."""

import contextlib
import logging
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benthic.runner.static_buffers import StaticBuffers

logger = logging.getLogger("benthic.runner")

_HISTORY_ENTRIES = 200_000  # allocations that a snapshot remembers


def memory_table(buffers: StaticBuffers, growth: Sequence[tuple[int, int]]) -> str:
    """The table of one family. `growth`: (batch size, bytes by which the graph pool grew) in the order of capture."""
    lines = [f"graph family {buffers.family}: static buffers", f"  {'name':<16}{'shape':<20}{'dtype':<10}{'MB':>10}"]
    for row in buffers.rows():
        note = f"  shared with {row.shared_with}" if row.shared_with else ""
        dtype = str(row.dtype).removeprefix("torch.")
        lines.append(f"  {row.name:<16}{row.shape!s:<20}{dtype:<10}{row.megabytes:>10.3f}{note}")
    lines.append(f"graph family {buffers.family}: pool growth")
    lines.extend(f"  batch {size:<40}{grown / 1e6:>10.3f}" for size, grown in growth)
    own, pool = buffers.total_megabytes(), sum(grown for _, grown in growth) / 1e6
    lines.append(
        f"graph family {buffers.family}: {own:.3f} MB of buffers + {pool:.3f} MB of pool = {own + pool:.3f} MB"
    )
    return "\n".join(lines)


def reserved_bytes(device: torch.device) -> int:
    """What torch's allocator holds on the device; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


@contextlib.contextmanager
def memory_profile(folder: Path | None, family: str, device: torch.device) -> Iterator[None]:
    """Record allocations inside the block into `folder`/graph_memory_<family>.pickle (torch's memory snapshot).

    None: nothing. Without CUDA it says so once and records nothing.
    """
    if folder is None:
        yield
        return
    if device.type != "cuda":
        logger.warning("--profile-graph-memory needs CUDA: nothing is written on %s", device.type)
        yield
        return
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_HISTORY_ENTRIES)
    try:
        yield
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"graph_memory_{family}.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    logger.info("wrote %s; open it at https://pytorch.org/memory_viz", path)
