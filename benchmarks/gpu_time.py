"""Device time of work on a CUDA device, between events; on a CPU, for trying a benchmark out, by the clock."""

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.common import Timing


def time_cuda(run: Callable[[], object], repeats: int) -> Timing:
    """Device time of `run`, between events."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return Timing.of(seconds)


def time_graph(run: Callable[[], object], repeats: int) -> Timing:
    """The same for work of many launches, replayed from a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return time_cuda(graph.replay, repeats)


def time_calls(calls: Sequence[Callable[[], object]], repeats: int, *, graph: bool, device: torch.device) -> Timing:
    """Time of one of the calls, which are made one after another and should do like work on data of their own."""

    def run() -> None:
        for call in calls:
            call()

    if device.type == "cuda":
        whole = (time_graph if graph else time_cuda)(run, repeats)
    else:
        run()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        whole = Timing.of(seconds)
    count = len(calls)
    return Timing(whole.median_s / count, whole.least_s / count, whole.most_s / count, whole.runs)
