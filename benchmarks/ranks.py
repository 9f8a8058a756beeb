"""Ranks as processes of this machine for benchmarks: a function runs on each of them at the same time.

    with RankProcesses(4, "cpu") as processes:
        first, *_ = processes.run(body, 3)   # what body(ranks, 3) gives on rank 0 … 3

`body` gets the rank's `Ranks`, joined as the engine's processes are: gloo, or NCCL where each has a GPU of its own. It
must be importable by name, its arguments and results picklable. One rank is a process too, so that all start alike.
"""

import gc
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

from benchmarks.engine import BenchEngine
from benthic.engine.build import pick_device
from benthic.parallel.launch import Ranks, meet, part
from benthic.parallel.layout import ParallelLayout

P = ParamSpec("P")
T = TypeVar("T")
TIMEOUT_S = 1800.0  # of one call of `run`


class RankFailed(Exception):
    """A rank raised, ended or did not answer in time; the message says which and why."""


class RankProcesses:
    """`size` context-parallel ranks; the processes stay for all calls of `run`. After an error all are killed."""

    def __init__(self, size: int, device: str) -> None:
        """`device`: cpu | cuda."""
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="benthic-ranks-"))
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        # forked from a process that has loaded torch and nothing else: a rank starts in milliseconds, not seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = ParallelLayout(rank=rank, cp_size=size, local_rank=rank, local_size=size)
            args = (place, device, str(self._folder / "meeting"), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, body: Callable[Concatenate[Ranks, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """What `body` gives on each rank. Raises RankFailed."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((body, args, kwargs))
            except OSError:
                self.close()
                raise RankFailed(f"rank {rank} of {self.size}: its process has ended") from None
        results: dict[int, T] = {}
        end = time.monotonic() + TIMEOUT_S
        while missing := sorted(set(range(self.size)) - set(results)):
            ready = wait([self._pipes[rank] for rank in missing], max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise RankFailed(f"no answer from ranks {missing} of {self.size} within {TIMEOUT_S:.0f} s")
            for rank in (rank for rank in missing if self._pipes[rank] in ready):
                try:
                    failed, results[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    failed = "its process has ended"
                if failed:
                    self.close()
                    raise RankFailed(f"rank {rank} of {self.size}: {failed}")
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def device_of(ranks: Ranks, device: str) -> torch.device:
    """The rank's device: a GPU of its own, where there are as many."""
    return pick_device(device, ranks.layout)[0]


def with_experts_spread(ranks: Ranks, spread: bool) -> Ranks:
    """The same ranks, with or without expert parallelism; one rank stays as it is."""
    if ranks.layout.world_size == 1:
        return ranks
    return replace(ranks, layout=replace(ranks.layout, expert_parallel=spread))


def lead_or_follow(engine: BenchEngine, ranks: Ranks, act: Callable[[BenchEngine], T]) -> T | None:
    """`act` on rank 0, while the others make its turns (None); then the engine is closed, whatever happened."""
    if not ranks.layout.leads:
        engine.follow()
        return None
    try:
        return act(engine)
    finally:
        engine.close()


def _serve(place: ParallelLayout, device: str, meeting: str, pipe: Connection) -> None:
    """A rank's process: it runs what it is given, until the pipe closes or somebody kills it."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_size))
    ranks: Ranks | None = None
    while True:
        try:
            body, args, kwargs = pipe.recv()
        except EOFError:
            break
        result: Any = None
        failed = ""
        try:
            if ranks is None:
                ranks = meet(place, f"file://{meeting}", pick_device(device, place)[0])
            result = body(ranks, *args, **kwargs)
        except BaseException:  # noqa: BLE001  # raised again by who waits for it
            failed = traceback.format_exc()
        gc.collect()
        torch.cuda.empty_cache()  # the next engine is sized by what is free; without a GPU nothing happens
        pipe.send((failed, result))
    part()
