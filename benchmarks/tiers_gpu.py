"""Copies between host frames and device pages beside the link's own rate, and what they cost a running decode.

Frames of 2.74 MiB (61 layers of 47,104 B, 78 of 36,864 B), 1,024 random pages of 1,280. The ceiling is one large
copy of the same registered memory, in the same run. Rates are of whole operations through the copy engine, from the
command to the polled completion, as the scheduler sees them. The decode is a CUDA graph of weight-bound products,
replayed while copies go on without a pause. `python -m benchmarks.tiers_gpu [--json]`; needs a CUDA device.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.common import Timing, arguments, report
from benthic.kvcache.commands import DONE
from benthic.tiers.host.copies import CopyEngine, LayeredCopies, StepHooks
from benthic.tiers.host.cuda_copies import CudaMover
from benthic.tiers.host.cudart import Cudart
from benthic.tiers.host.layout import FrameLayout, PayloadLayout
from benthic.tiers.host.slabs import HostSlabs, SlabGeometry

SHAPES = ((61, 47_104), (78, 36_864))  # layers, bytes a slice
PAGES, MOVED, OP_PAGES = 1280, 1024, 32
ROWS, WIDTH, PRODUCTS = 16, 8192, 16  # of the decode: 2 GiB of weights
REPLAYS, AHEAD = 300, 4


@dataclass
class Bench:
    """A pool, its host lane and the copies between them, over one shape."""

    layout: FrameLayout
    pool: torch.Tensor  # uint8 [layers, pages, slice]
    slabs: HostSlabs
    mover: CudaMover
    copies: LayeredCopies
    pages: list[int]
    frames: list[int]
    ended: StepHooks  # a step that is over
    op: int = 0

    @property
    def num_bytes(self) -> int:
        return MOVED * self.layout.payload_bytes

    def start(self, *, back: bool, waited: bool = False) -> int:
        """Give all pages to the copies, as operations of a node's size; how many."""
        for first in range(0, MOVED, OP_PAGES):
            pages, frames = self.pages[first : first + OP_PAGES], self.frames[first : first + OP_PAGES]
            self.op += 1
            if back:
                self.copies.load_back(self.op, frames, pages, self.ended, waited=waited)
            else:
                self.copies.backup(self.op, pages, frames, self.ended)
        return MOVED // OP_PAGES

    def move(self, *, back: bool, waited: bool = False) -> None:
        """Move all pages, and wait as the scheduler does; `waited`: in groups of layers."""
        finish(self.copies, self.start(back=back, waited=waited))


def finish(copies: CopyEngine, count: int) -> None:
    """Poll until `count` operations are done."""
    while count:
        for completion in copies.poll():
            assert completion.value == DONE
            count -= 1
        time.sleep(50e-6)  # a scheduler polls once a tick: in a busy loop it would keep the interpreter lock


@contextmanager
def opened(layers: int, slice_bytes: int, max_pitch: int | None = None) -> Iterator[Bench]:
    """Memory for one shape, brought in and registered."""
    layout = FrameLayout((PayloadLayout("target_kv", tuple(range(layers)), slice_bytes),))
    slabs = HostSlabs.open(SlabGeometry(frame_bytes=layout.frame_bytes, frames_per_lane=MOVED, num_owners=1))
    slabs.fault_in()
    pinned = slabs.register_cuda()
    assert pinned.pinned, pinned.reason
    pool = torch.randint(0, 256, (layers, PAGES, slice_bytes), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    runtime = Cudart(pool.device)
    if max_pitch is not None:
        runtime.max_pitch = max_pitch
    mover = CudaMover(slabs, layout, {"target_kv": pool}, runtime)
    copies = LayeredCopies(mover, layers)
    ended = copies.step_hooks(())
    ended.begin()
    ended.end(False)
    dice = random.Random(0)
    pages, frames = dice.sample(range(PAGES), MOVED), dice.sample(range(MOVED), MOVED)
    try:
        yield Bench(layout, pool, slabs, mover, copies, pages, frames, ended)
    finally:
        copies.close()
        slabs.close()


def check(bench: Bench) -> None:
    """Every page comes back equal, and no other page changes."""
    before = bench.pool.clone()
    bench.move(back=False)
    bench.pool[:, bench.pages] = 0
    torch.cuda.synchronize()
    bench.move(back=True)
    assert torch.equal(bench.pool, before), "a page came back changed"


def timed(run: Callable[[], object], repeats: int) -> Timing:
    """Wall time until the device is idle again."""
    run()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Timing.of(seconds)


def ceilings(bench: Bench, repeats: int) -> tuple[float, float]:
    """GB/s of one large copy of the registered lane: to the device, and from it."""
    (span,) = bench.slabs.spans()
    host = torch.frombuffer(bench.slabs.frame(0).obj, dtype=torch.uint8, count=span.num_bytes, offset=span.start)
    assert host.is_pinned()
    device = torch.empty(span.num_bytes, dtype=torch.uint8, device="cuda")
    kept = device.copy_(host).clone()
    to_device = timed(lambda: device.copy_(host, non_blocking=True), repeats).per_second(span.num_bytes)
    from_device = timed(lambda: host.copy_(kept, non_blocking=True), repeats).per_second(span.num_bytes)
    return to_device / 1e9, from_device / 1e9


def host_time(bench: Bench, parts: int) -> float:
    """Microseconds of the calling thread a page, the dearer direction, where a page goes in so many pieces."""
    layers = bench.layout.num_layers
    step = -(-layers // parts)
    groups = [range(first, min(first + step, layers)) for first in range(0, layers, step)]
    worst = 0.0
    pages, frames = bench.pages[:OP_PAGES], bench.frames[:OP_PAGES]
    for backwards in (False, True):
        seconds = []
        for _ in range(20):
            start = time.perf_counter()
            for group in groups:
                if backwards:
                    bench.mover.load_back(frames, pages, group, None)
                else:
                    bench.mover.backup(pages, frames, group, None)
            seconds.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        worst = max(worst, Timing.of(seconds).median_s / OP_PAGES * 1e6)
    return worst


class Decode:
    """A graph of products that read 2 GiB of weights, as a decode step of a large model does."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        weights = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(PRODUCTS)]
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            for weight in weights:
                x @ weight
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            for weight in weights:
                x @ weight
        self._weights = weights

    def run(self, feed: Callable[[], None] = lambda: None) -> float:
        """Seconds a replay, a few replays ahead of the device, as a runner is; `feed` is called between launches."""
        marks: list[torch.cuda.Event] = []
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            first.record()
            for _ in range(REPLAYS):
                self.graph.replay()
                marks.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                marks[-1].record()
                feed()
                if len(marks) > AHEAD:
                    marks[-AHEAD].synchronize()
            last.record()
            last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / REPLAYS


def losses(bench: Bench, repeats: int) -> dict[str, tuple[float, float]]:
    """For load-back, backup and both: the share of its speed that decode loses, and the GB/s moved meanwhile."""
    decode, found = Decode(), {}
    alone = Timing.of([decode.run() for _ in range(max(3, repeats // 2))]).median_s
    for name, ways in (("loadback", (True,)), ("backup", (False,)), ("both", (True, False))):
        slowed, rates = [], []
        for _ in range(max(3, repeats // 2)):
            seconds, rate = beside(bench, decode, ways)
            slowed.append(seconds)
            rates.append(rate)
        again = decode.run()  # clocks drift: compare with the better of two
        found[name] = (1 - min(alone, again) / Timing.of(slowed).median_s, Timing.of(rates).median_s)
    return found


def beside(bench: Bench, decode: Decode, ways: Sequence[bool]) -> tuple[float, float]:
    """Seconds a replay while copies go on without a pause, and GB/s copied."""
    due = done = 0
    each = MOVED // OP_PAGES

    def feed() -> None:
        nonlocal due, done
        done += len(bench.copies.poll())
        while due - done < 2 * each * len(ways):  # the next batch waits when one ends
            due += sum(bench.start(back=back) for back in ways)

    feed()
    start = time.perf_counter()
    seconds = decode.run(feed)
    moved, passed = done, time.perf_counter() - start
    finish(bench.copies, due - done)
    return seconds, moved * OP_PAGES * bench.layout.payload_bytes / passed / 1e9


def measure_shape(bench: Bench, repeats: int) -> dict[str, float]:
    """GB/s of load-back and backup, and the ceilings of the same run."""
    check(bench)
    to_device, from_device = ceilings(bench, repeats)
    back = timed(lambda: bench.move(back=True), repeats).per_second(bench.num_bytes) / 1e9
    grouped = timed(lambda: bench.move(back=True, waited=True), repeats).per_second(bench.num_bytes) / 1e9
    out = timed(lambda: bench.move(back=False), repeats).per_second(bench.num_bytes) / 1e9
    return {
        "loadback_gb_s": back,
        "loadback_grouped_gb_s": grouped,
        "loadback_ceiling_gb_s": to_device,
        "loadback_ratio": back / to_device,
        "backup_gb_s": out,
        "backup_ceiling_gb_s": from_device,
        "backup_ratio": out / from_device,
    }


def main() -> None:
    """Measure and print."""
    sys.setswitchinterval(0.0001)  # as the engine process has it: copying threads must not hold up the launching one
    chosen = arguments(__doc__ or "", repeats=9).parse_args()
    rows = [("device", torch.cuda.get_device_name()), ("cores", str(os.cpu_count()))]
    figures: dict[str, object] = {}
    ratios: dict[str, list[float]] = {"loadback_ratio": [], "backup_ratio": []}
    for layers, slice_bytes in SHAPES:
        with opened(layers, slice_bytes) as bench:
            found = measure_shape(bench, chosen.repeats)
            for way in ("loadback", "backup"):
                ratios[f"{way}_ratio"].append(found[f"{way}_ratio"])
                rate, ceiling = found[f"{way}_gb_s"], found[f"{way}_ceiling_gb_s"]
                share = f"{rate / ceiling:.1%}"
                rows.append((f"{way}, {layers} layers", f"{rate:.1f} GB/s, {share} of the {ceiling:.1f} of one copy"))
            grouped = found["loadback_grouped_gb_s"]
            share = f"{grouped / found['loadback_ceiling_gb_s']:.1%}"
            rows.append((f"loadback, {layers} layers, in groups", f"{grouped:.1f} GB/s, {share} of one copy"))
            figures |= {f"{key}_{layers}": round(value, 4) for key, value in found.items()}
            if layers == SHAPES[0][0]:
                costs(bench, chosen.repeats, rows, figures)
    with opened(*SHAPES[0], max_pitch=0) as bench:
        found = measure_shape(bench, 3)
        rates = f"load-back {found['loadback_gb_s']:.1f}, backup {found['backup_gb_s']:.1f} GB/s"
        rows.append(("as for layers past 2 GiB", f"{rates} (3D copies)"))
        figures |= {f"{way}_gb_s_3d": round(found[f"{way}_gb_s"], 2) for way in ("loadback", "backup")}
    figures |= {key: round(min(values), 4) for key, values in ratios.items()}
    report("L2: copies between host and device", rows, figures, as_json=chosen.json)


def costs(bench: Bench, repeats: int, rows: list[tuple[str, str]], figures: dict[str, object]) -> None:
    """Host time and decode's loss."""
    groups = bench.copies.num_groups
    whole, parts = host_time(bench, 1), host_time(bench, groups)
    rows.append(("host time a page", f"{whole:.2f} µs in one piece, {parts:.2f} µs in {groups}"))
    figures |= {"host_us_per_page": round(whole, 3), "host_us_per_page_in_groups": round(parts, 3)}
    lost = losses(bench, repeats)
    for name, (loss, rate) in lost.items():
        rows.append((f"decode beside {name}", f"loses {loss:.1%} while {rate:.1f} GB/s move"))
        figures |= {f"decode_loss_{name}": round(loss, 4), f"decode_{name}_gb_s": round(rate, 2)}
    figures["decode_loss"] = round(max(lost["loadback"][0], lost["backup"][0]), 4)


if __name__ == "__main__":
    main()
