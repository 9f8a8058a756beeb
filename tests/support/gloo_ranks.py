"""Ranks as real processes that meet over gloo: a test gives a function, and every rank runs it.

    with GlooRanks(4, tmp_path) as ranks:
        sums = ranks.run(sum_of_ranks, 3)   # what sum_of_ranks(3) gives on rank 0 … 3

The processes stay, so that many checks share the seconds that it takes to start them. In a rank the default group is
there; the function must be importable by name, its arguments and results picklable. It runs on one torch thread.
"""

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")
GROUP_TIMEOUT_S = 60.0  # of the default group: a rank that is left alone ends by itself, if nobody kills it
START_S = 120.0
IN_A_RANK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class RankDied(Exception):
    """A rank's process has ended without an answer."""


class GlooRanks:
    """`size` processes, started by the first `run`. Not for several threads.

    After an error the ranks stand at different places, so all are killed; the next `run` starts new ones.
    """

    def __init__(self, size: int, folder: Path, *, timeout_s: float = 60.0) -> None:
        """The ranks meet by a file in `folder`; `timeout_s` is for each `run`."""
        self.size = size
        self._folder = folder
        self._timeout_s = timeout_s
        self._starts = 0
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, body: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """What `body` gives on each rank. Raises the first error of any of them, RankDied and TimeoutError."""
        results = self._run(set(range(self.size)), (body, args, kwargs))
        return [results[rank] for rank in range(self.size)]

    def run_dying(self, dying: set[int], body: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> dict[int, T]:
        """As `run`, by rank: of all but `dying`, which end by themselves meanwhile. No process is left afterwards."""
        end = time.monotonic() + self._timeout_s
        try:
            results = self._run(set(range(self.size)) - dying, (body, args, kwargs))
            for rank in sorted(dying):
                self._processes[rank].join(max(0.0, end - time.monotonic()))
                if self._processes[rank].is_alive():
                    raise TimeoutError(f"rank {rank} of {self.size} has not ended within {self._timeout_s} s")
            return results
        finally:
            self.close()

    def close(self) -> None:
        """Kill what runs."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- the processes ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        # forked from a process that has loaded torch and nothing else: a rank starts in milliseconds, not seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        store = self._folder.resolve() / f"meeting-{self._starts}"  # a file serves one meeting
        self._starts += 1
        with _environment(IN_A_RANK):
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        self._answers(set(range(self.size)), START_S)

    def _run(
        self, answering: set[int], task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    ) -> dict[int, Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(task)
        return self._answers(answering, self._timeout_s)

    def _answers(self, answering: set[int], timeout_s: float) -> dict[int, Any]:
        """One of each. Whatever goes wrong, no process is left."""
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        try:
            while missing := answering - set(results):
                ready = wait([self._pipes[rank] for rank in missing], max(0.0, end - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"no answer from ranks {sorted(missing)} of {self.size} within {timeout_s} s")
                for rank in [rank for rank in missing if self._pipes[rank] in ready]:
                    results[rank] = self._answer(rank)
        except BaseException:
            self.close()
            raise
        return results

    def _answer(self, rank: int) -> Any:
        try:
            error, result = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(10)
            raise RankDied(f"rank {rank} has ended with {self._processes[rank].exitcode}") from None
        if error is not None:
            raise error
        return result


def run_gloo(size: int, folder: Path, body: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """`body` once, on ranks of its own; see GlooRanks.run."""
    with GlooRanks(size, folder) as ranks:
        return ranks.run(body, *args, **kwargs)


@contextlib.contextmanager
def _environment(words: dict[str, str]) -> Iterator[None]:
    """For the processes started inside."""
    before = {name: os.environ.get(name) for name in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for name, word in before.items():
            if word is None:
                del os.environ[name]
            else:
                os.environ[name] = word


def _serve(rank: int, size: int, store: Path, pipe: Connection) -> None:
    """A rank's process: it runs what it is given, until the pipe closes or somebody kills it."""
    torch.set_num_threads(1)
    bound = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=bound)
    pipe.send((None, None))
    while True:
        try:
            body, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[BaseException | None, Any] = None, body(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  # raised again by who waits for it
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            answer = _that_travels(error), None
        pipe.send(answer)


def _that_travels(error: BaseException) -> BaseException:
    """The error itself where it can be pickled, otherwise one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # whatever kept it
        said = RuntimeError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            said.add_note(note)
        return said
    return error
