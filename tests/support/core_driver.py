"""One cache core driven by hand: requests come from the test, and operations end when and how the test says."""

from typing import TypeVar

from benthic.kvcache import CacheCore, Command, CoreConfig, OpId, PageRun, Stream
from benthic.kvcache.commands import COUNTS, DONE, Agreed
from tests.support.naive_cache import hashes_of

C = TypeVar("C", bound=Command)


def prompt(name: int, num_pages: int) -> list[bytes]:
    """The hashes of a prompt that shares nothing with one of another name."""
    return hashes_of((name,) * num_pages)


def branch(name: int, shared: int, num_pages: int, other: int = 200) -> list[bytes]:
    """A prompt that shares its first pages with `prompt(name, …)`."""
    return hashes_of((name,) * shared + (other,) * (num_pages - shared))


class CoreDriver:
    """A core, its clocks, and all commands that it has given. Every invariant is checked after every step."""

    def __init__(self, config: CoreConfig) -> None:
        self.core = CacheCore(config)
        self.ticks = 0
        self.now_us = 0
        self.rates = (0, 0)  # µs a page, reading and computing, as rank 0 tells them
        self.next_id = 0
        self.commands: list[Command] = []

    def tick(self, *ends: tuple[OpId, int], us: int = 1_000) -> list[Command]:
        """One tick in which these operations end; gives its commands."""
        self.ticks += 1
        self.now_us += us
        agreed = [Agreed(op, value) for op, value in ends]
        read, compute = self.rates
        self.core.begin_tick(self.ticks, self.now_us, agreed, read_us_per_page=read, compute_us_per_page=compute)
        self.core.end_tick()
        return self.take()

    def take(self) -> list[Command]:
        """The commands since the last call; they are kept as well."""
        self.core.check()
        new = self.core.take_commands()
        self.commands += new
        return new

    def given(self, kind: type[C]) -> list[C]:
        """All commands of a kind so far, in order."""
        self.take()
        return [command for command in self.commands if isinstance(command, kind)]

    def last(self, kind: type[C]) -> C:
        """The latest command of a kind."""
        return self.given(kind)[-1]

    def settle(self, *streams: Stream) -> None:
        """All that is in flight in these streams (default: all, and what follows from it) ends well."""
        self.take()
        while True:
            windows = self.core.windows()
            chosen = streams or tuple(Stream)
            ends = [(op, self._well(stream, op)) for stream in chosen for op in windows[stream]]
            self.tick(*ends)
            if streams or not self.core.in_flight:
                return

    def _well(self, stream: Stream, op: OpId) -> int:
        return 1 + self.core.state.ops.ops[op].num_pages if stream in COUNTS else DONE

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(self, hashes: list[bytes], limit: int | None = None) -> PageRun:
        """A sequence that takes what is cached."""
        self.next_id += 1
        run = self.core.open(self.next_id, hashes, len(hashes) if limit is None else limit)
        self.take()
        return run

    def compute(self, run: PageRun, hashes: list[bytes]) -> list[tuple[int, int]]:
        """Whatever it lacks of these pages is computed and committed; gives the duplicates."""
        assert self.core.allocate(run, len(hashes) - len(run.pages))
        replaced = self.core.commit(run, hashes[run.num_cached :])
        self.take()
        return replaced

    def serve(self, hashes: list[bytes]) -> None:
        """A sequence from beginning to end."""
        run = self.open(hashes)
        self.compute(run, hashes)
        self.close(run)

    def close(self, run: PageRun) -> None:
        """The sequence is over."""
        self.core.close(run)
        self.take()

    # --- what there is ------------------------------------------------------------------------------------------------

    def found(self, hashes: list[bytes]) -> tuple[int, int]:
        """Leading pages in L1, and in any tier."""
        found = self.core.probe(hashes, len(hashes))
        return found.in_l1, found.end

    def free(self) -> tuple[int, int]:
        """Free pages and frames, over all lanes."""
        return sum(lane.free for lane in self.core.lanes()), sum(lane.free for lane in self.core.l2_lanes())
