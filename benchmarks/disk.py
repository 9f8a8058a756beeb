"""The disk floor against the disk: spill and reload of large frames beside raw O_DIRECT transfers of the same file.

Both sides move the same slots (header and frame in one transfer) at the depth at which the raw disk is fastest, and
sync in the same groups. Passes alternate and the ratio is taken pair by pair, since a disk's speed drifts. Every page
that a pass brought back is compared with what was spilled before a time is reported.

    python -m benchmarks.disk [--dir /tmp] [--json]
"""

import argparse
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from benchmarks.common import arguments, report
from benthic.common.units import GIB, MIB
from benthic.config.disk import DiskConfig, DiskSpec
from benthic.kvcache.commands import DONE, ClearDisk, Lookup, Reload, Spill, Touch
from benthic.tiers.disk.floor import open_floor
from benthic.tiers.disk.format import PAGE, FrameGeometry, Verdict, check, pack_header
from benthic.tiers.disk.index import Entry, SlotIndex, map_bytes_for
from benthic.tiers.disk.io import SystemDisk
from benthic.tiers.disk.keeper import GROUP_BYTES
from benthic.tiers.disk.readers import check_headers
from benthic.tiers.disk.slab import aligned_buffer
from benthic.tiers.disk.store import DiskStore

LARGE = FrameGeometry(78 * 64 * 576, 1, (("target_kv", 78 * 64 * 576),))  # 2.74 MiB: 78 layers, 64 tokens, 576 bytes
SMALL = FrameGeometry(PAGE, 1, (("kv", PAGE),))
DEPTHS = (2, 4, 8, 16)
STAGING_BYTES = 512 * MIB  # what is under way until its commit: two groups would not keep a fast disk busy
TUNING_PAGES = 160  # frames a pass while the depth is looked for
PAGES_A_NODE = 32
MANY_SLOTS = 200_000
LOOKUP_PAGES = 2_000
TICKS = 400
NAMESPACE = bytes(31) + b"b"


class Frames:
    """Host frames, each with content of its own."""

    def __init__(self, count: int, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.count = count
        self._block = aligned_buffer(count * frame_bytes)

    def frame(self, index: int) -> memoryview:
        """Frame `index`."""
        return self._block[index * self.frame_bytes : (index + 1) * self.frame_bytes]

    def fill(self) -> list[int]:
        """Random content; the checksum of each frame."""
        rng = np.random.default_rng(1)
        for index in range(self.count):
            self.frame(index)[:] = rng.bytes(self.frame_bytes)
        return self.sums()

    def sums(self) -> list[int]:
        """The checksum of each frame."""
        return [xxh3_64_intdigest(self.frame(index)) for index in range(self.count)]

    def blank(self) -> None:
        """Make every frame differ from what was in it."""
        for index in range(self.count):
            self.frame(index)[:PAGE] = b"\xff" * PAGE


@dataclass
class Session:
    """A store on a folder, with operation numbers."""

    store: DiskStore
    frames: Frames
    next_op: int = 0
    age: int = 0

    def op(self) -> int:
        """A new operation number."""
        self.next_op += 1
        return self.next_op

    def wait(self, ops: Sequence[int]) -> dict[int, int]:
        """Poll, as the engine's ticks do, until all are answered."""
        seen: dict[int, int] = {}
        while not all(op in seen for op in ops):
            seen.update((c.op, c.value) for c in self.store.poll())
            time.sleep(0.0005)
        return seen

    def spill(self, hashes: Sequence[bytes]) -> None:
        """Spill all frames under these hashes, node by node as staging has room; returns when they are durable."""
        free = self.store.stats().staging_total
        waiting: dict[int, int] = {}  # durable operation → its pages
        for start in range(0, len(hashes), PAGES_A_NODE):
            node = hashes[start : start + PAGES_A_NODE]
            while free < len(node):
                free += sum(self._settled(waiting))
                time.sleep(0.001)
            free -= len(node)
            gather, durable = self.op(), self.op()
            self.age += 1
            frames = tuple(range(start, start + len(node)))
            self.store.submit(
                Spill(gather=gather, durable=durable, first=start, frames=frames, hashes=tuple(node), age=self.age)
            )
            waiting[durable] = len(node)
        while waiting:
            list(self._settled(waiting))
            time.sleep(0.001)

    def _settled(self, waiting: dict[int, int]) -> Iterator[int]:
        for completion in self.store.poll():
            assert completion.value == DONE, "a spill failed"
            yield waiting.pop(completion.op, 0)

    def reload(self, hashes: Sequence[bytes]) -> None:
        """Reload all pages into their frames."""
        ops = []
        for start in range(0, len(hashes), PAGES_A_NODE):
            node = tuple(hashes[start : start + PAGES_A_NODE])
            ops.append(self.op())
            frames = tuple(range(start, start + len(node)))
            self.store.submit(Reload(op=ops[-1], first=start, frames=frames, hashes=node))
        counts = self.wait(ops)
        assert sum(counts[op] - 1 for op in ops) == len(hashes), "pages are missing"

    def clear(self) -> None:
        """Empty the floor."""
        op = self.op()
        self.store.submit(ClearDisk(op=op))
        self.wait([op])


class RawDisk:
    """Plain transfers of the slots of a slab file, with nothing around them."""

    def __init__(self, path: Path, geometry: FrameGeometry, frames: Frames) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._size = geometry.slot_bytes
        self._frames = frames

    def write(self, num_slots: int, depth: int) -> float:
        """Write slots 0 …, syncing as often as the store does, beside the writes; returns GB/s."""
        written = threading.Semaphore(0)
        sync_every = -(-GROUP_BYTES // self._size)

        def sync() -> None:
            for done in range(1, num_slots + 1):
                written.acquire()
                if done % sync_every == 0 or done == num_slots:
                    os.fdatasync(self._fd)

        def move(slot: int, header: memoryview) -> None:
            assert os.pwritev(self._fd, [header, self._frames.frame(slot)], slot * self._size) == self._size
            written.release()

        return self._run(num_slots, depth, move, sync)

    def read(self, num_slots: int, depth: int, first: int = 0) -> float:
        """Read slots `first` … into the frames 0 …; returns GB/s."""

        def move(slot: int, header: memoryview) -> None:
            offset = (first + slot) * self._size
            assert os.preadv(self._fd, [header, self._frames.frame(slot)], offset) == self._size

        return self._run(num_slots, depth, move, lambda: None)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _run(
        self, num_slots: int, depth: int, move: Callable[[int, memoryview], None], beside: Callable[[], None]
    ) -> float:
        slots = iter(range(num_slots))

        def work() -> None:
            header = aligned_buffer(PAGE)
            for slot in slots:
                move(slot, header)

        threads = [threading.Thread(target=work) for _ in range(depth)] + [threading.Thread(target=beside)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return num_slots * self._size / (time.perf_counter() - start) / 1e9


@contextmanager
def open_session(config: DiskConfig, geometry: FrameGeometry, frames: Frames) -> Iterator[Session]:
    """A store at work."""
    floor = open_floor(
        config,
        namespace=NAMESPACE,
        words={"model": "benchmark"},
        geometry=geometry,
        rank=0,
        num_ranks=1,
        io=SystemDisk(),
    )
    store = DiskStore(floor, config, rank=0, num_owners=1, frames=frames)
    try:
        yield Session(store, frames)
    finally:
        store.close(30.0)


def config_for(folder: Path, num_slots: int, geometry: FrameGeometry) -> DiskConfig:
    """A floor on one disk with at least `num_slots` slots."""
    budget = num_slots * geometry.slot_bytes + map_bytes_for(num_slots) + 4 * MIB
    return DiskConfig(disks=(DiskSpec(path=folder, budget_bytes=budget),), staging_bytes=STAGING_BYTES)


def hashes_of(run: int, count: int) -> list[bytes]:
    """Content hashes for the pages of one pass."""
    return [run.to_bytes(4, "little") + page.to_bytes(28, "little") for page in range(count)]


def fastest_depth(measure: Callable[[int], float]) -> int:
    """The depth with the best rate of two passes each."""
    rates = {depth: max(measure(depth), measure(depth)) for depth in DEPTHS}
    return max(rates, key=lambda depth: rates[depth])


@dataclass
class Pairs:
    """Rates of passes that took turns, GB/s."""

    depth: int
    store: list[float]
    raw: list[float]
    cpu_us: float = 0.0  # of the store, a frame

    @property
    def ratio(self) -> float:
        """Median of the pairs' ratios."""
        return statistics.median(s / r for s, r in zip(self.store, self.raw, strict=True))

    def describe(self) -> str:
        """For the table."""
        ratios = [s / r for s, r in zip(self.store, self.raw, strict=True)]
        return (
            f"{statistics.median(self.store):.2f} GB/s, raw {statistics.median(self.raw):.2f} at depth {self.depth}: "
            f"ratio {self.ratio:.3f}  ({min(ratios):.3f} … {max(ratios):.3f}, {len(ratios)} pairs); "
            f"{self.cpu_us:.0f} µs of CPU a frame"
        )


def alternate(pairs: int, depth: int, store: Callable[[], float], raw: Callable[[], float]) -> Pairs:
    """Passes of store and raw disk in turns, each going first as often as the other."""
    result = Pairs(depth, [], [])
    for pair in range(pairs):
        order = [(result.store, store), (result.raw, raw)]
        for rates, run in order if pair % 2 == 0 else order[::-1]:
            gc.collect()
            rates.append(run())
    return result


def measure_transfers(folder: Path, num_pages: int, pairs: int) -> tuple[Pairs, Pairs]:
    """Spill and reload against the raw disk."""
    frames = Frames(num_pages, LARGE.frame_bytes)
    wanted = frames.fill()
    num_slots = num_pages * 10 // 9 + 2  # below the mark at which collecting starts
    config = config_for(folder, num_slots, LARGE)
    with open_session(config, LARGE, frames) as session:  # makes the file, and writes it once
        slab = Path(session.store.stats().path)
        session.spill(hashes_of(0, num_pages))
        session.clear()
    raw = RawDisk(slab, LARGE, frames)
    raw.write(num_pages, 4)
    runs = iter(range(1, 1000))
    last = [0]
    cpu: list[float] = []

    def rate(run: Callable[[], None]) -> float:
        start, used = time.perf_counter(), time.process_time()
        run()
        seconds = time.perf_counter() - start
        cpu.append((time.process_time() - used) / num_pages * 1e6)
        return num_pages * LARGE.slot_bytes / seconds / 1e9

    sample = min(num_pages, TUNING_PAGES)
    depth = fastest_depth(lambda depth: raw.write(sample, depth))
    with open_session(replace(config, queue_depth=depth), LARGE, frames) as session:

        def spill() -> float:
            session.clear()
            last[0] = next(runs)
            return rate(lambda: session.spill(hashes_of(last[0], num_pages)))

        spills = alternate(pairs, depth, spill, lambda: raw.write(num_pages, depth))
        spills.cpu_us = statistics.median(cpu)
        cpu.clear()
        session.clear()
        last[0] = next(runs)
        session.spill(hashes_of(last[0], num_pages))  # the raw passes have overwritten the slots

    depth = fastest_depth(lambda depth: raw.read(sample, depth))
    with open_session(replace(config, queue_depth=depth), LARGE, frames) as session:

        def reload() -> float:
            frames.blank()
            found = rate(lambda: session.reload(hashes_of(last[0], num_pages)))
            assert frames.sums() == wanted, "a page came back with other bytes"
            return found

        reloads = alternate(pairs, depth, reload, lambda: raw.read(num_pages, depth))
        reloads.cpu_us = statistics.median(cpu)
    raw.close()
    slab.unlink()
    return spills, reloads


def measure_checksum() -> tuple[float, float]:
    """Microseconds a frame for making the header, and for verifying header and payload."""
    frame = Frames(1, LARGE.frame_bytes)
    frame.fill()
    block = aligned_buffer(PAGE)
    page = bytes(32)
    made, verified = [], []
    for _ in range(50):
        start = time.perf_counter()
        pack_header(block, page, frame.frame(0), LARGE)
        middle = time.perf_counter()
        assert check(block, page, frame.frame(0), LARGE) is Verdict.OK
        made.append(middle - start)
        verified.append(time.perf_counter() - middle)
    return statistics.median(made) * 1e6, statistics.median(verified) * 1e6


def fill_many(folder: Path) -> DiskConfig:
    """A floor with 200,000 live pages of 4 KiB, written without the store."""
    config = config_for(folder, MANY_SLOTS * 8 // 7, SMALL)  # below the mark at which collecting starts
    floor = open_floor(
        config, namespace=NAMESPACE, words={"model": "benchmark"}, geometry=SMALL, rank=0, num_ranks=1, io=SystemDisk()
    )
    slab, index = floor.slab.path, floor.index
    pages = hashes_of(0, MANY_SLOTS)
    batch = aligned_buffer(256 * SMALL.slot_bytes)
    with slab.open("r+b", buffering=0) as file:
        for start in range(0, MANY_SLOTS, 256):
            some = pages[start : start + 256]
            for i, page in enumerate(some):
                slot = batch[i * SMALL.slot_bytes : (i + 1) * SMALL.slot_bytes]
                pack_header(slot[:PAGE], page, slot[PAGE:], SMALL)
            file.write(batch[: len(some) * SMALL.slot_bytes])
        os.fsync(file.fileno())
    _store_entries(index, pages)
    floor.close()
    return config


def _store_entries(index: SlotIndex, pages: Sequence[bytes]) -> None:
    for start in range(0, len(pages), 20_000):
        some = range(start, min(start + 20_000, len(pages)))
        index.apply([(pages[i], Entry(i, i % 512, i // 512)) for i in some], ())


@dataclass
class Small:
    """Figures of the floor with many small pages."""

    load_us: float  # CPU, a slot
    load_s: float
    header_us: float  # CPU, a header checked behind serving
    lookup_ms: float
    tick_us: float
    tick_p99_us: float
    report_us: float  # report_now of a landed reload, a page


def measure_small(folder: Path) -> Small:
    """Cold load, look-ups and the scheduler's share with 200,000 live pages."""
    config = fill_many(folder)
    frames = Frames(LOOKUP_PAGES, SMALL.frame_bytes)
    gc.collect()
    cpu, wall = time.thread_time(), time.perf_counter()
    with open_session(config, SMALL, frames) as session:
        load_us = (time.thread_time() - cpu) / MANY_SLOTS * 1e6
        load_s = time.perf_counter() - wall
        assert session.store.stats().slots_used == MANY_SLOTS
        pages = hashes_of(0, MANY_SLOTS)
        lookup_ms = statistics.median(_look_up(session, pages[i * 5000 :][:LOOKUP_PAGES]) for i in range(21)) * 1e3
        ticks = _tick(session, pages)
        report_us = _report(session, pages[:LOOKUP_PAGES])
        header_us = _check_headers(session, pages[:5000])
    ordered = sorted(ticks)
    return Small(
        load_us,
        load_s,
        header_us,
        lookup_ms,
        statistics.median(ticks) * 1e6,
        ordered[len(ordered) * 99 // 100] * 1e6,
        report_us,
    )


def _look_up(session: Session, pages: Sequence[bytes]) -> float:
    op = session.op()
    command = Lookup(op=op, first=0, hashes=tuple(pages))
    start = time.perf_counter()
    session.store.submit(command)
    while not (done := session.store.poll()):
        time.sleep(0)
    assert [(c.op, c.value) for c in done] == [(op, 1 + len(pages))], "a live page was not found"
    return time.perf_counter() - start


def _tick(session: Session, pages: Sequence[bytes]) -> list[float]:
    """What a tick spends on L3 while spills, reloads, look-ups and touches go on."""
    spent = []
    ops: list[int] = []
    answered: set[int] = set()
    new = hashes_of(1, TICKS * 8)
    for tick in range(TICKS):
        gather, durable, lookup, reload = (session.op() for _ in range(4))
        ops += (gather, durable, lookup, reload)
        some = tuple(pages[tick * 100 :][:16])
        commands = (
            Spill(
                gather=gather,
                durable=durable,
                first=0,
                frames=tuple(range(8)),
                hashes=tuple(new[tick * 8 :][:8]),
                age=tick,
            ),
            Lookup(op=lookup, first=0, hashes=some),
            Reload(op=reload, first=0, frames=tuple(range(64, 80)), hashes=some),
            Touch(first=0, hashes=some, age=tick),
        )
        start = time.perf_counter()
        for command in commands:
            session.store.submit(command)
        done = session.store.poll()
        spent.append(time.perf_counter() - start)
        answered.update(completion.op for completion in done)
        time.sleep(0.005)
    session.wait([op for op in ops if op not in answered])
    return spent


def _report(session: Session, pages: Sequence[bytes]) -> float:
    """The cost of `report_now` for a reload of many pages, a page."""
    op = session.op()
    before = session.store.stats().reloaded_pages
    session.store.submit(Reload(op=op, first=0, frames=tuple(range(len(pages))), hashes=tuple(pages)))
    until = time.monotonic() + 30.0
    while session.store.stats().reloaded_pages - before < len(pages) - 16:  # most of it has landed
        assert time.monotonic() < until, "the reload does not come"
        time.sleep(0.001)
    start = time.perf_counter()
    count = session.store.report_now(op)
    spent = time.perf_counter() - start
    assert count > len(pages) // 2, "less is reported than has landed"
    return spent / len(pages) * 1e6


def _check_headers(session: Session, pages: Sequence[bytes]) -> float:
    store = session.store
    start = time.thread_time()
    bad: list[object] = []
    done = check_headers(
        [(page, slot) for slot, page in enumerate(pages)], store.slab, store.reads, bad.append, lambda pause_s: False
    )
    assert (done, bad) == (len(pages), []), "a header was not what the index says"
    return (time.thread_time() - start) / len(pages) * 1e6


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "", repeats=5)
    parser.add_argument("--dir", type=Path, default=Path("/tmp"), help="a folder on the disk to measure")
    parser.add_argument("--pages", type=int, default=608, help="frames of 2.74 MiB a pass (default 608, 1.6 GiB)")
    args: argparse.Namespace = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benthic-disk-", dir=args.dir) as name:
        large, small = Path(name, "large"), Path(name, "small")
        large.mkdir()
        small.mkdir()
        spills, reloads = measure_transfers(large, args.pages, max(5, args.repeats))
        made_us, verified_us = measure_checksum()
        many = measure_small(small)
    rows = [
        ("spill", spills.describe()),
        ("reload", reloads.describe()),
        ("header and checksum", f"{made_us:.0f} µs a frame to make, {verified_us:.0f} µs to verify"),
        ("cold load", f"{many.load_us:.1f} µs of CPU a slot, {many.load_s:.2f} s for {MANY_SLOTS:,} (bar: 20 µs)"),
        ("header check behind it", f"{many.header_us:.1f} µs of CPU a slot"),
        ("look-up", f"{many.lookup_ms:.2f} ms for {LOOKUP_PAGES:,} hashes (bar: 5 ms)"),
        ("scheduler's share", f"{many.tick_us:.0f} µs a tick, p99 {many.tick_p99_us:.0f} µs (bar: 50 µs)"),
        ("report at a deadline", f"{many.report_us:.2f} µs a page (bar: 1 µs)"),
    ]
    figures = {
        "spill_ratio": spills.ratio,
        "reload_ratio": reloads.ratio,
        "spill_gb_s": statistics.median(spills.store),
        "reload_gb_s": statistics.median(reloads.store),
        "raw_write_gb_s": statistics.median(spills.raw),
        "raw_read_gb_s": statistics.median(reloads.raw),
        "spill_ratios": [s / r for s, r in zip(spills.store, spills.raw, strict=True)],
        "reload_ratios": [s / r for s, r in zip(reloads.store, reloads.raw, strict=True)],
        "spill_cpu_us": spills.cpu_us,
        "reload_cpu_us": reloads.cpu_us,
        "write_depth": spills.depth,
        "read_depth": reloads.depth,
        "header_made_us": made_us,
        "header_verified_us": verified_us,
        "cold_load_us_per_slot": many.load_us,
        "cold_load_s": many.load_s,
        "header_check_us_per_slot": many.header_us,
        "lookup_ms": many.lookup_ms,
        "tick_us": many.tick_us,
        "tick_p99_us": many.tick_p99_us,
        "report_us_per_page": many.report_us,
    }
    gib = args.pages * LARGE.slot_bytes / GIB
    note = (
        f"{args.pages} frames of {LARGE.frame_bytes / MIB:.2f} MiB a pass ({gib:.2f} GiB) in {args.dir}; "
        f"staging {STAGING_BYTES // MIB} MiB; both sides need the processors: a busy machine lowers the ratios"
    )
    report("Disk floor", rows, figures, as_json=args.json, note=note)


if __name__ == "__main__":
    main()
