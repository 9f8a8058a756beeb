"""Backups and load-backs: every byte where it belongs, and nothing before its time.

One suite for both movers: the CPU's, and CUDA's over a simulated device.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benthic.kvcache.commands import DONE, FAILED, Completion
from benthic.tiers.host.copies import LayeredCopies, StepHooks
from benthic.tiers.host.cpu_copies import CpuMover, cpu_copies
from benthic.tiers.host.cuda_copies import CudaMover
from benthic.tiers.host.layout import FrameLayout, PayloadLayout
from benthic.tiers.host.progress import Mark
from benthic.tiers.host.slabs import POISON
from tests.support.fake_cuda import FakeCuda
from tests.support.host_pools import small_slabs

LAYERS, PAGES, FRAMES = 6, 7, 9
KV, INDEX = PayloadLayout("target_kv", tuple(range(LAYERS)), 96), PayloadLayout("index_k", (0, 1, 4), 40)
DRAFT = PayloadLayout("draft_kv", (LAYERS,), 96)
PLAIN, FULL = FrameLayout((KV,)), FrameLayout((KV, INDEX, DRAFT))


def make_pools(layout: FrameLayout, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        p.name: torch.randint(0, 256, (p.num_layers, PAGES, p.slice_bytes), generator=rng, dtype=torch.uint8)
        for p in layout.payloads
    }


def image(layout: FrameLayout, pools: dict[str, torch.Tensor], page: int) -> bytes:
    """What the page's frame must hold, padding aside."""
    return b"".join(pools[p.name][:, page].numpy().tobytes() for p in layout.payloads)


def run_step(hooks: StepHooks, layers: int, work: Callable[[int], None] = lambda layer: None) -> None:
    """A forward pass: `work` at each layer."""
    hooks.begin()
    for layer in range(layers):
        hooks.before_layer(layer)
        work(layer)
        hooks.after_layer(layer)
    hooks.end(False)


def ended_step(copies: LayeredCopies) -> StepHooks:
    hooks = copies.step_hooks(())
    hooks.begin()
    hooks.end(False)
    return hooks


def wait_for(copies: LayeredCopies, count: int) -> list[Completion]:
    found: list[Completion] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        found += copies.poll()
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return found


MOVERS = ("cpu", "cuda", "cuda unpinned")


class Bench:
    """Slabs of poisoned frames, pools and the copies between them."""

    def __init__(
        self, folder: Path, layout: FrameLayout = PLAIN, per_slab: int = FRAMES, mover: str = "cpu", seed: int = 0
    ) -> None:
        self.layout = layout
        self.slabs = small_slabs(folder, layout.frame_bytes, FRAMES, per_slab=per_slab)
        for frame in range(FRAMES):
            self.slabs.poison(frame)
        self.pools = make_pools(layout)
        self.device = None if mover == "cpu" else FakeCuda(seed)
        if self.device is None:
            self.copies = cpu_copies(self.slabs, layout, self.pools)
        else:
            if mover == "cuda":
                assert self.slabs.register_cuda(self.device).pinned
            moving = CudaMover(self.slabs, layout, self.pools, self.device)
            self.copies = LayeredCopies(moving, layout.num_layers)

    def work(self) -> None:
        """Let a simulated device go on."""
        if self.device is not None:
            self.device.work()

    def frame(self, index: int) -> bytes:
        return bytes(self.slabs.frame(index)[: self.layout.payload_bytes])

    def close(self) -> None:
        self.copies.close()
        self.slabs.close()
        if self.device is not None:
            self.device.stop()
            assert not self.device.registered


@pytest.fixture(params=MOVERS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, mover=request.param)
    yield made
    made.close()


def is_poison(data: bytes | np.ndarray) -> bool:
    return set(bytes(data)) == {POISON}


@st.composite
def layouts(draw: st.DrawFn) -> FrameLayout:
    """One payload, all three, or a payload of every layer beside one that only some layers compute."""
    some = st.sets(st.integers(0, LAYERS - 1), min_size=1).map(lambda layers: tuple(sorted(layers)))
    sparse = some.map(lambda layers: FrameLayout((KV, PayloadLayout("index_k", layers, 40), DRAFT)))
    return draw(st.sampled_from([PLAIN, FULL]) | sparse)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_backed_up_and_loaded_back_elsewhere_is_equal(data: st.DataObject, tmp_path: Path) -> None:
    layout, mover = data.draw(layouts()), data.draw(st.sampled_from(MOVERS))
    seed = data.draw(st.integers(0, 99))
    bench = Bench(tmp_path, layout, per_slab=data.draw(st.integers(1, FRAMES)), mover=mover, seed=seed)
    count = data.draw(st.integers(0, PAGES))
    pages = data.draw(st.permutations(range(PAGES)))[:count]
    frames = data.draw(st.permutations(range(FRAMES)))[:count]
    targets = data.draw(st.permutations(range(PAGES)))[:count]
    wanted = {frame: image(layout, bench.pools, page) for page, frame in zip(pages, frames, strict=True)}
    hooks = bench.copies.step_hooks(())
    cut = data.draw(st.integers(0, count))
    bench.copies.backup(1, pages[:cut], frames[:cut], hooks)
    run_step(hooks, layout.num_layers)
    bench.copies.backup(2, pages[cut:], frames[cut:], hooks)
    assert wait_for(bench.copies, 2) == [Completion(1, DONE), Completion(2, DONE)]
    for frame in range(FRAMES):
        assert bench.frame(frame) == wanted.get(frame, bytes([POISON]) * layout.payload_bytes)
        padding = bytes(bench.slabs.frame(frame)[layout.payload_bytes :])
        assert is_poison(padding)  # not touched
    for pool in bench.pools.values():
        pool.fill_(POISON)
    bench.copies.load_back(3, frames, targets, hooks, waited=data.draw(st.booleans()))
    assert wait_for(bench.copies, 1) == [Completion(3, DONE)]
    for page in range(PAGES):
        found = image(layout, bench.pools, page)
        assert found == (wanted[frames[targets.index(page)]] if page in targets else bytes([POISON]) * len(found))
    bench.close()


def test_groups_cover_the_layers_once_and_a_small_model_has_fewer(tmp_path: Path) -> None:
    for layers, groups in ((1, 1), (2, 2), (4, 4), (5, 3), (30, 4), (61, 4), (78, 4)):
        layout = FrameLayout((PayloadLayout("target_kv", tuple(range(layers)), 16),))
        slabs = small_slabs(tmp_path, layout.frame_bytes, 1)
        copies = cpu_copies(slabs, layout, {"target_kv": torch.zeros(layers, 2, 16, dtype=torch.uint8)})
        assert copies.num_groups == groups
        assert [layer for group in copies._groups for layer in group] == list(range(layers))
        copies.close()
        slabs.close()


def test_a_backup_follows_the_step_group_by_group(bench: Bench) -> None:
    hooks = bench.copies.step_hooks(())
    bench.copies.backup(5, [2], [4], hooks)
    pool, size = bench.pools["target_kv"], KV.slice_bytes
    hooks.begin()
    for layer in range(LAYERS):
        hooks.before_layer(layer)
        assert is_poison(bench.frame(4)[layer * size :])  # nothing of this layer or a later one has left
        pool[layer, 2] = layer  # what the layer computes
        hooks.after_layer(layer)
        if layer + 1 == LAYERS // 2:
            until(lambda: bench.work() or not is_poison(bench.frame(4)[:size]))
    hooks.end(False)
    assert wait_for(bench.copies, 1) == [Completion(5, DONE)]
    assert bench.frame(4) == image(PLAIN, bench.pools, 2)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_a_backup_waits_for_a_step_that_has_not_run_and_a_load_back_behind_it_does_not(bench: Bench) -> None:
    before = ended_step(bench.copies)
    bench.copies.backup(1, [0], [0], before)
    wait_for(bench.copies, 1)
    later = bench.copies.step_hooks(())
    bench.copies.backup(2, [1], [1], later)
    bench.copies.load_back(3, [0], [5], before)
    assert wait_for(bench.copies, 1) == [Completion(3, DONE)]
    assert is_poison(bench.frame(1))
    assert image(PLAIN, bench.pools, 5) == image(PLAIN, bench.pools, 0)
    run_step(later, LAYERS)
    assert wait_for(bench.copies, 1) == [Completion(2, DONE)]


def test_a_load_back_waits_for_the_end_of_the_step_launched_before(bench: Bench) -> None:
    old = image(PLAIN, bench.pools, 3)
    step = bench.copies.step_hooks(())
    bench.copies.load_back(1, [0], [3], step, waited=True)
    seen = []
    run_step(step, LAYERS, lambda layer: seen.append(image(PLAIN, bench.pools, 3)))
    assert seen == [old] * LAYERS  # the frame is poison: an early write would show
    assert wait_for(bench.copies, 1) == [Completion(1, DONE)]
    assert is_poison(image(PLAIN, bench.pools, 3))


class Gated(CpuMover):
    """Load-backs of a group pass only when the test lets them; `error` is raised in place of the copy."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.slabs, bench.layout, bench.pools)
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None
        self.backups: list[tuple[tuple[int, ...], range]] = []
        self.load_backs: list[tuple[tuple[int, ...], range]] = []

    def backup(self, pages: Sequence[int], frames: Sequence[int], layers: range, after: Mark) -> Mark:
        if self.error is not None:
            raise self.error
        self.backups.append((tuple(pages), layers))
        return super().backup(pages, frames, layers, after)

    def load_back(self, frames: Sequence[int], pages: Sequence[int], layers: range, after: Mark) -> Mark:
        assert self.gate.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        self.load_backs.append((tuple(pages), layers))
        return super().load_back(frames, pages, layers, after)


@pytest.fixture
def bench_on_cpu(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def gated(bench_on_cpu: Bench) -> Iterator[tuple[Gated, LayeredCopies]]:
    mover = Gated(bench_on_cpu)
    copies = LayeredCopies(mover, LAYERS, num_groups=3)
    yield mover, copies
    copies.close()


def test_a_forward_waits_for_its_load_backs_group_by_group(
    bench_on_cpu: Bench, gated: tuple[Gated, LayeredCopies]
) -> None:
    mover, copies = gated
    bench_on_cpu.slabs.frame(0)[:] = bytes(range(1, 256)) * 16 + bytes(16)
    copies.load_back(1, [0], [2], None, waited=True)
    step, reached = copies.step_hooks([1]), []
    pool = bench_on_cpu.pools["target_kv"]
    size = KV.slice_bytes

    def compute(layer: int) -> None:
        assert bytes(pool[layer, 2].numpy()) == bytes(bench_on_cpu.slabs.frame(0)[layer * size : (layer + 1) * size])
        reached.append(layer)

    forward = threading.Thread(target=run_step, args=(step, LAYERS, compute))
    forward.start()
    for group in range(3):
        time.sleep(0.02)
        assert reached == list(range(2 * group))
        mover.gate.release()
        until(lambda due=2 * group + 2: len(reached) == due)
    forward.join()
    assert wait_for(copies, 1) == [Completion(1, DONE)]


def test_a_load_back_that_no_forward_waits_for_goes_in_one_piece(gated: tuple[Gated, LayeredCopies]) -> None:
    mover, copies = gated
    copies.load_back(1, [0], [2], None)
    step, reached = copies.step_hooks([1]), []
    forward = threading.Thread(target=run_step, args=(step, LAYERS, reached.append))
    forward.start()
    time.sleep(0.02)
    assert reached == []
    mover.gate.release()  # one copy, and all layers are there
    forward.join()
    assert reached == list(range(LAYERS))
    assert wait_for(copies, 1) == [Completion(1, DONE)]


def test_a_graph_s_replay_waits_for_all_groups_at_once(bench_on_cpu: Bench, gated: tuple[Gated, LayeredCopies]) -> None:
    mover, copies = gated
    copies.load_back(1, [0], [2], None, waited=True)
    step, replayed = copies.step_hooks([1]), threading.Event()

    def replay() -> None:
        step.begin()
        step.before_all()
        replayed.set()
        step.after_all()
        step.end(False)

    forward = threading.Thread(target=replay)
    forward.start()
    mover.gate.release(2)
    assert not replayed.wait(0.05)
    mover.gate.release()
    forward.join()
    assert replayed.is_set()
    copies.backup(2, [2], [1], step)
    wait_for(copies, 2)
    assert mover.backups == [((2,), range(LAYERS))]  # computed in one piece, copied in one piece


def test_a_forward_waits_for_no_other_load_back(gated: tuple[Gated, LayeredCopies]) -> None:
    mover, copies = gated
    copies.load_back(1, [0], [2], None, waited=True)
    run_step(copies.step_hooks(()), LAYERS)  # would hang
    mover.gate.release(3)
    assert wait_for(copies, 1) == [Completion(1, DONE)]
    run_step(copies.step_hooks([1]), LAYERS)  # polled: over


def test_load_backs_of_one_moment_go_group_by_group_together(gated: tuple[Gated, LayeredCopies]) -> None:
    """Else a forward could begin only when nearly everything is there."""
    mover, copies = gated
    step = copies.step_hooks(())
    copies.load_back(1, [8], [6], None, waited=True)
    for op in (2, 3, 4):
        copies.load_back(op, [op], [op], step, waited=True)
    other = copies.step_hooks(())
    copies.load_back(5, [5], [5], other, waited=True)
    time.sleep(0.02)
    mover.gate.release(3)
    assert wait_for(copies, 1) == [Completion(1, DONE)]
    for hooks in (step, other):
        run_step(hooks, LAYERS)
    mover.gate.release(6)
    assert [done.op for done in wait_for(copies, 4)] == [2, 3, 4, 5]
    groups = [range(0, 2), range(2, 4), range(4, 6)]
    assert mover.load_backs == [(pages, g) for pages in ((6,), (2, 3, 4), (5,)) for g in groups]


def test_a_failed_step_fails_the_backups_behind_it_and_only_those(bench: Bench) -> None:
    step = bench.copies.step_hooks(())
    bench.copies.backup(1, [1], [1], step)
    step.begin()
    step.before_layer(0)
    step.end(True)
    bench.copies.backup(2, [2], [2], step)
    bench.copies.backup(3, [3], [3], ended_step(bench.copies))
    assert wait_for(bench.copies, 3) == [Completion(1, FAILED), Completion(2, FAILED), Completion(3, DONE)]
    assert "the step failed" in bench.copies.last_backup_error
    assert is_poison(bench.frame(2))
    bench.copies.load_back(4, [3], [0], step)  # it is not under way any more
    assert wait_for(bench.copies, 1) == [Completion(4, DONE)]


def test_a_failed_copy_out_is_a_failed_backup_and_the_next_one_works(gated: tuple[Gated, LayeredCopies]) -> None:
    mover, copies = gated
    mover.error = OSError("no such frame")
    copies.backup(1, [1], [1], ended_step(copies))
    assert wait_for(copies, 1) == [Completion(1, FAILED)]
    assert copies.last_backup_error == "OSError: no such frame"
    mover.error = None
    copies.backup(2, [1], [1], ended_step(copies))
    assert wait_for(copies, 1) == [Completion(2, DONE)]


def test_a_failed_load_back_stops_the_forward_that_stands_on_it_and_the_engine(
    gated: tuple[Gated, LayeredCopies],
) -> None:
    mover, copies = gated
    mover.error = RuntimeError("the link is down")
    copies.load_back(1, [0], [2], None, waited=True)
    step = copies.step_hooks([1])
    mover.gate.release(3)
    step.begin()
    with pytest.raises(RuntimeError, match="the link is down"):
        step.before_layer(0)
    step.end(True)
    with pytest.raises(RuntimeError, match="the link is down"):
        copies.poll()


def test_closing_does_not_wait_for_a_step_that_never_came_to_the_runner(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    step = bench.copies.step_hooks(())
    bench.copies.backup(1, [1], [1], step)
    bench.copies.load_back(2, [1], [1], step, waited=True)
    del step  # its owner has given up
    bench.close()
    assert Completion(1, FAILED) in bench.copies.poll()


def test_a_layer_that_is_reported_twice_is_a_bug(bench: Bench) -> None:
    step = bench.copies.step_hooks(())
    run_step(step, LAYERS)
    with pytest.raises(AssertionError, match="twice"):
        step.after_layer(LAYERS - 1)


def test_a_pool_of_another_shape_is_refused(tmp_path: Path) -> None:
    slabs = small_slabs(tmp_path, PLAIN.frame_bytes, 1)
    for pool in (
        torch.zeros(LAYERS - 1, 3, 96),
        torch.zeros(LAYERS, 3, 96),
        torch.zeros(3, LAYERS, 24).transpose(0, 1),
    ):
        with pytest.raises(AssertionError):
            CpuMover(slabs, PLAIN, {"target_kv": pool})
    slabs.close()


def test_steps_do_not_keep_those_before_them(bench: Bench) -> None:
    step, seen = bench.copies.step_hooks(()), []
    for op in range(5):
        run_step(step, LAYERS)
        bench.copies.load_back(op, [op], [op], step, waited=True)
        following = bench.copies.step_hooks([op])
        seen.append(weakref.ref(step))
        step = following
    run_step(step, LAYERS)
    wait_for(bench.copies, 5)
    gc.collect()
    assert [ref() for ref in seen[:-1]] == [None] * 4
