"""What each rank runs for `benchmarks.collectives`: control exchanges, ticks, capacity and speed. See `ranks`."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import tick
from benchmarks.engine import BenchEngine
from benchmarks.rank_models import checkpoint
from benchmarks.ranks import device_of, lead_or_follow, with_experts_spread
from benthic.engine.frames import hear
from benthic.engine.loops import Lead, follow
from benthic.engine.pulse import Pulse
from benthic.messages import FromEngine, Shutdown, ToEngine
from benthic.parallel.control import Control
from benthic.parallel.launch import Ranks

FRAME_BYTES = 100  # of a tick in which some tokens are taken
MIN_NUMBERS = 64  # a window of operations of every kind
CAPACITY_PAGE = 16
FREE_PAGES = 4  # that L1 keeps free a lane
PROMPT_PAGES = 8  # of the capacity's prompts: whole turns over 1, 2, 4 and 8 lanes


@dataclass(frozen=True, slots=True)
class ControlTimes:
    """Milliseconds, on average over many, until the slowest rank has it."""

    frame_ms: float
    min_ms: float
    tick_ms: float  # a frame, then a MIN


def control_times(ranks: Ranks, repeats: int) -> ControlTimes:
    """The exchanges alone, one after another as ticks make them."""
    control = ranks.control
    frame = bytes(FRAME_BYTES)

    def share() -> None:
        control.share(frame if ranks.layout.leads else None)

    def least() -> None:
        control.min_reduce([0] * MIN_NUMBERS)

    def timed(*acts: object) -> float:
        least()  # all begin together
        start = time.perf_counter()
        for _ in range(repeats):
            for act in acts:
                act()  # type: ignore[operator]  # the two above
        least()  # a broadcast's sender does not wait for the others
        return (time.perf_counter() - start) / repeats * 1e3

    timed(share, least)
    return ControlTimes(timed(share), timed(least), timed(share, least))


class Watched:
    """A control that notes how many exchanges each tick makes: from one frame to the next."""

    def __init__(self, inner: Control) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.by_tick: list[int] = []
        self._inner = inner

    @property
    def collectives(self) -> int:
        return self._inner.collectives

    @collectives.setter
    def collectives(self, value: int) -> None:
        self._inner.collectives = value

    def share(self, data: bytes | None) -> bytes:
        self.by_tick.append(0)
        before = self._inner.collectives
        got = self._inner.share(data)
        self.by_tick[-1] += self._inner.collectives - before
        return got

    def min_reduce(self, values: Sequence[int]) -> Sequence[int]:
        before = self._inner.collectives
        least = self._inner.min_reduce(values)
        if self.by_tick:
            self.by_tick[-1] += self._inner.collectives - before
        return least


class Quiet:
    """A server that says nothing for a while, then asks for the end; counts the exchanges that are made meanwhile."""

    def __init__(self, control: Control, quiet_s: float) -> None:
        self._control = control
        self._until = time.monotonic() + quiet_s
        self._at_first = control.collectives
        self.collectives = 0

    def send(self, message: FromEngine) -> None:
        """Nobody listens."""

    def receive(self, wait_ms: int) -> list[ToEngine]:
        left = self._until - time.monotonic()
        if left > 0:
            time.sleep(min(left, wait_ms / 1e3))
            return []
        self.collectives = self._control.collectives - self._at_first
        return [Shutdown()]


@dataclass(frozen=True, slots=True)
class TickCollectives:
    """Exchanges of the schedulers: in each tick of a busy engine with a host tier, and while it was idle."""

    by_tick: tuple[int, ...]
    alone: tuple[int, ...]  # without a tier below L1: nothing is ever in flight
    idle: int
    idle_s: float


def tick_collectives(ranks: Ranks, idle_s: float) -> TickCollectives | None:
    """On rank 0. The engine process's own loops, over a tiny model on the CPU."""
    device = torch.device("cpu")
    counted: list[tuple[int, ...]] = []
    idle = 0
    for lower in ({}, {"l2_size": "16MiB"}):
        control = Watched(ranks.control)
        watched = replace(ranks, control=control)
        engine = BenchEngine(
            checkpoint("llama-tiny", device), watched, device="cpu", dtype="float32", page_size=16, l1_pages=64,
            max_context=1024, chunk_tokens=256, max_running=4, **lower,
        )  # fmt: skip
        if not ranks.layout.leads:
            follow(engine.engine, control, Quiet(control, 0), Pulse(rank=ranks.layout.rank))
            continue
        dice = random.Random(0)
        for _ in range(4):  # evicts, so that L2 fills
            engine.run([[dice.randrange(2, 500) for _ in range(300)] for _ in range(2)], 16)
            engine.settle()
        counted.append(tuple(control.by_tick))
        quiet = Quiet(control, idle_s)
        Lead(engine.engine, quiet, Pulse(), alone=False).run()
        idle += quiet.collectives
    return TickCollectives(counted[1], counted[0], idle, 2 * idle_s) if counted else None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of engines with the same L1 a rank."""

    cached_tokens: int  # most that L1 held at once, while ever new prompts came
    found_tokens: int  # of prompts asked a second time that fill three quarters of that


def capacity(ranks: Ranks, kept_pages: int) -> Capacity | None:
    """On rank 0; `kept_pages` a rank beside those that L1 keeps free."""
    lanes = ranks.layout.cp_size
    engine = BenchEngine(
        checkpoint("llama-tiny", torch.device("cpu")), ranks, device="cpu", dtype="float32", max_running=4,
        page_size=CAPACITY_PAGE, l1_pages=kept_pages + FREE_PAGES, l1_free_pages=FREE_PAGES, max_context=512,
        chunk_tokens=256,
    )  # fmt: skip
    dice = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[dice.randrange(2, 500) for _ in range(PROMPT_PAGES * CAPACITY_PAGE)] for _ in range(count)]

    def fill(engine: BenchEngine) -> Capacity:
        most = 0
        for prompt in prompts(2 * kept_pages * lanes // PROMPT_PAGES):
            engine.run([prompt], 1, salt="fill")
            most = max(most, sum(lane.cached for lane in engine.engine.state().lanes))
        engine.flush("l1")
        engine.settle()
        some = prompts(kept_pages * lanes * 3 // 4 // PROMPT_PAGES)
        found = [sum(sum(engine.run([prompt], 1, salt="again").cached) for prompt in some) for _ in range(2)]
        return Capacity(most * CAPACITY_PAGE, found[1])

    return lead_or_follow(engine, ranks, fill)


def tick_times(ranks: Ranks, running: int, ticks: int) -> list[float] | None:
    """Host milliseconds of rank 0's decode ticks, with a runner that answers at once; see `tick`."""
    engine = tick.build(ranks.control, running)
    if not ranks.layout.leads:
        while not (frame := hear(ranks.control)).ends:
            engine.follow(frame)
        return None
    tick.fill(engine, running, sampled=False)
    tick.measure(engine, ticks // 10, running)
    times = tick.measure(engine, ticks, running)
    engine.end()
    return times


@dataclass(frozen=True, slots=True)
class SpeedSizes:
    """Of the prompts and decode runs that are timed."""

    prefill: int  # tokens
    context: int  # of decode rows
    batch: int
    steps: int
    chunk: int
    page: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second."""

    prefill_per_s: float
    decode_per_s: float


def speed(ranks: Ranks, name: str, device: str, sizes: SpeedSizes, spread: bool = False) -> Speed | None:
    """One long prompt, then a batch that decodes; on rank 0."""
    ranks = with_experts_spread(ranks, spread)
    place = device_of(ranks, device)
    model = checkpoint(name, place)
    longest = max(sizes.prefill, sizes.context) + 2 * sizes.steps + sizes.page
    pages = (3 * sizes.prefill + 2 * sizes.batch * (sizes.context + 2 * sizes.steps)) // sizes.page
    engine = BenchEngine(
        model, ranks, device=device, dtype="bfloat16" if place.type == "cuda" else "float32", page_size=sizes.page,
        chunk_tokens=sizes.chunk, max_running=sizes.batch, max_context=longest,
        l1_pages=pages // ranks.layout.cp_size + 2 * sizes.batch + 8,
    )  # fmt: skip
    dice = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [dice.randrange(2, model.config.vocab_size) for _ in range(tokens)]

    def act(engine: BenchEngine) -> Speed:
        engine.run([prompt(sizes.prefill)], 1)
        first = statistics.median(engine.run([prompt(sizes.prefill)], 1).first_s for _ in range(sizes.repeats))
        rows = [prompt(sizes.context) for _ in range(sizes.batch)]
        engine.run(rows, 2, salt="decode")
        rate = statistics.median(
            engine.run(rows, sizes.steps, salt="decode").decode_per_s for _ in range(sizes.repeats)
        )
        return Speed(sizes.prefill / first, rate)

    return lead_or_follow(engine, ranks, act)
