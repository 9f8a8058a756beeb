"""Small traces, and what a cache without limits finds of them, counted in a way that anyone can check."""

from collections.abc import Iterable, Sequence

from benthic.simulation import Trace
from benthic.simulation.trace import Chains, TraceRequest

PAGE = 512  # tokens


def trace_of(prompts: Iterable[Sequence[int]], apart_s: float = 60, output_tokens: int = 5) -> Trace:
    """Requests `apart_s` after one another, one page an id; prompt and answer together end inside the last page."""
    chains = Chains()
    requests = tuple(
        TraceRequest(
            arrival_us=round(i * apart_s * 1e6),
            input_tokens=len(ids) * PAGE - 10,
            output_tokens=output_tokens,
            hashes=chains.hashes(list(ids)),
        )
        for i, ids in enumerate(prompts)
    )
    return Trace(requests, tuple(chains.unique_by_position))


def most_that_can_be_found(prompts: Iterable[Sequence[int]]) -> int:
    """Pages whose whole prefix, themselves included, came before."""
    seen: set[tuple[int, ...]] = set()
    found = 0
    for ids in prompts:
        for end in range(1, len(ids) + 1):
            prefix = tuple(ids[:end])
            found += prefix in seen
            seen.add(prefix)
    return found
