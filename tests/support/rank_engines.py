"""Whole engines of several ranks as threads of this process, over one checkpoint folder: `RealEngine` for n ranks."""

import threading
import time
from pathlib import Path

from benthic.config import options_from_mapping, resolve
from benthic.engine.build import build_engine
from benthic.engine.core import EngineCore
from benthic.engine.frames import hear
from benthic.messages import Ready
from benthic.parallel.launch import ALONE, Ranks
from benthic.parallel.layout import ParallelLayout
from benthic.weights.locate import locate
from tests.support.real_engine import RealEngine
from tests.support.thread_ranks import Meeting, ThreadCollectives

START_S = 120.0


class RankEngines(RealEngine):
    """Use as a context manager. `engine` is rank 0's; `engines` has all."""

    def __init__(self, folder: Path, **options: object) -> None:
        given = {"model": str(folder), "device": "cpu", "dtype": "float32", "page_size": 16, "seed": 1, **options}
        config = resolve(options_from_mapping(given, "test")).engine
        parallel, size = config.parallel, config.parallel.world_size
        meetings = [Meeting(size) for _ in range(3)]
        self.errors: list[BaseException] = []
        built: list[tuple[EngineCore, Ready] | None] = [None] * size
        self.groups: list[ThreadCollectives] = []
        started = threading.Barrier(size)
        self.turns = [0] * size  # ticks that are over, by rank; rank 0's are counted by its caller

        def run(rank: int, ranks: Ranks) -> None:
            try:
                built[rank] = build_engine(config, locate(str(folder)), ranks=ranks)
                started.wait(START_S)
                while rank and not (frame := hear(ranks.control)).ends:
                    built[rank][0].follow(frame)  # type: ignore[index]  # set above
                    self.turns[rank] = built[rank][0].tick_count  # type: ignore[index]  # as above
                if rank:
                    built[rank][0].close(5.0)  # type: ignore[index]  # as above
            except BaseException as error:  # noqa: BLE001  # raised again by whoever waits
                if not isinstance(error, threading.BrokenBarrierError):
                    self.errors.append(error)
                started.abort()
                for meeting in meetings:
                    meeting.barrier.abort()

        self._threads = []
        for rank in range(size):
            start, control, group = (ThreadCollectives(meeting, rank, size) for meeting in meetings)
            self.groups.append(group)
            layout = ParallelLayout(
                rank=rank,
                cp_size=parallel.cp_size,
                tp_size=parallel.tp_size,
                expert_parallel=parallel.expert_parallel,
            )
            ranks = ALONE if size == 1 else Ranks(layout, start, control, group)
            self._threads.append(threading.Thread(target=run, args=(rank, ranks), daemon=True))
            self._threads[-1].start()
        self._threads[0].join(START_S)
        if self.errors:
            raise self.errors[0]
        assert all(built), "a rank was not built in time"
        self.engines = [pair[0] for pair in built if pair]
        self.engine, self.ready = built[0]  # type: ignore[misc]  # checked above
        self._next = 0

    def settle(self) -> None:
        """Wait until every rank has made the turns that rank 0 has made."""
        end = time.monotonic() + START_S
        while any(turns != self.engine.tick_count for turns in self.turns[1:]):
            if self.errors:
                raise self.errors[0]
            assert time.monotonic() < end, f"turns {self.turns[1:]}, rank 0 {self.engine.tick_count}"
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.engine.end()
        self.engine.close(5.0)
        for thread in self._threads:
            thread.join(START_S)
        if self.errors:
            raise self.errors[0]
