"""Backups and load-backs on a CUDA device, over slabs in shared memory; with real kernels ahead of and behind them."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benthic.forward import LayerHooks
from benthic.kvcache.commands import DONE, FAILED, Completion
from benthic.models.registry import load_model
from benthic.tiers.host.copies import LayeredCopies, StepHooks
from benthic.tiers.host.cuda_copies import CudaMover, cuda_copies
from benthic.tiers.host.cudart import Cudart
from benthic.tiers.host.layout import FrameLayout, PayloadLayout
from benthic.tiers.host.slabs import POISON, HostSlabs, SlabGeometry
from benthic.weights.locate import locate
from tests.support.model_driver import ModelDriver
from tests.support.steps import NUM_PAGES, Script, make_bench, prompt_of
from tests.support.tiny_model import LAYERS as TINY_LAYERS

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parents[1] / "data" / "oracles" / "llama"
LAYERS, PAGES, FRAMES, SLICE = 9, 64, 48, 4608
LONG = 200_000_000  # cycles of the device: a tenth of a second
FULL = FrameLayout(
    (
        PayloadLayout("target_kv", tuple(range(LAYERS)), SLICE),
        PayloadLayout("index_k", (0, 1, LAYERS - 1), 1056),
        PayloadLayout("draft_kv", (LAYERS,), SLICE),
    )
)


def open_slabs(layout: FrameLayout, frames: int, *, per_slab: int | None = None, pin: bool = True) -> HostSlabs:
    bound = layout.frame_bytes * (per_slab or frames)
    shape = SlabGeometry(frame_bytes=layout.frame_bytes, frames_per_lane=frames, num_owners=1, max_slab_bytes=bound)
    slabs = HostSlabs.open(shape, backing="shm")
    slabs.fault_in()
    if pin:
        report = slabs.register_cuda()
        assert report.pinned, report.reason
    for frame in range(frames):
        slabs.poison(frame)
    return slabs


class Bench:
    """A random pool, poisoned frames, and the copies between them; steps run on a stream of their own."""

    def __init__(self, cuda: torch.device, *, pin: bool = True, max_pitch: int | None = None) -> None:
        self.slabs = open_slabs(FULL, FRAMES, per_slab=5, pin=pin)
        self.pools = {
            p.name: torch.randint(0, 128, (p.num_layers, PAGES, p.slice_bytes), dtype=torch.uint8, device=cuda)
            for p in FULL.payloads
        }
        torch.cuda.synchronize()
        runtime = Cudart(cuda)
        if max_pitch is not None:
            runtime.max_pitch = max_pitch
        self.copies = LayeredCopies(CudaMover(self.slabs, FULL, self.pools, runtime), FULL.num_layers)
        self.stream = torch.cuda.Stream()

    def image(self, page: int) -> bytes:
        torch.cuda.synchronize()
        return b"".join(self.pools[p.name][:, page].cpu().numpy().tobytes() for p in FULL.payloads)

    def frame(self, index: int) -> bytes:
        return bytes(self.slabs.frame(index)[: FULL.payload_bytes])

    def step(self, waits: tuple[int, ...] = (), work: Any = lambda layer: None) -> StepHooks:
        hooks = self.copies.step_hooks(waits)
        with torch.cuda.stream(self.stream):
            hooks.begin()
            for layer in range(FULL.num_layers):
                hooks.before_layer(layer)
                work(layer)
                hooks.after_layer(layer)
            hooks.end(False)
        return hooks

    def wait(self, count: int) -> list[Completion]:
        return wait_for(self.copies, count)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.copies.close()
        self.slabs.close()


def wait_for(copies: LayeredCopies, count: int) -> list[Completion]:
    found: list[Completion] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        found += copies.poll()
        assert time.monotonic() < deadline
    return found


@pytest.fixture(params=["2d", "3d", "unpinned", "unpinned 3d"])
def bench(request: pytest.FixtureRequest, cuda: torch.device) -> Iterator[Bench]:
    made = Bench(cuda, pin="unpinned" not in request.param, max_pitch=0 if "3d" in request.param else None)
    yield made
    made.close()


def test_registered_memory_is_pinned_for_torch(cuda: torch.device) -> None:
    slabs = open_slabs(FULL, 6, per_slab=2)
    for frame in range(6):
        assert torch.frombuffer(slabs.frame(frame), dtype=torch.uint8).is_pinned()
    slabs.close()


def test_pages_go_out_and_come_back_elsewhere(bench: Bench) -> None:
    rng = torch.Generator().manual_seed(3)
    pages = torch.randperm(PAGES, generator=rng)[:30].tolist()
    frames = torch.randperm(FRAMES, generator=rng)[:30].tolist()
    targets = torch.randperm(PAGES, generator=rng)[:30].tolist()
    wanted = [bench.image(page) for page in pages]
    step = bench.step()
    bench.copies.backup(1, pages[:20], frames[:20], step)
    bench.copies.backup(2, pages[20:], frames[20:], step)
    assert bench.wait(2) == [Completion(1, DONE), Completion(2, DONE)]
    assert [bench.frame(frame) for frame in frames] == wanted
    untouched = next(frame for frame in range(FRAMES) if frame not in frames)
    assert set(bench.frame(untouched)) == {POISON}
    for pool in bench.pools.values():
        pool.fill_(POISON)
    bench.copies.load_back(3, frames, targets, bench.step())
    assert bench.wait(1) == [Completion(3, DONE)]
    assert [bench.image(page) for page in targets] == wanted
    untouched = next(page for page in range(PAGES) if page not in targets)
    assert set(bench.image(untouched)) == {POISON}


def test_a_backup_takes_what_the_step_computes_late(bench: Bench) -> None:
    def compute(layer: int) -> None:
        torch.cuda._sleep(LONG // 10)
        for payload in FULL.payloads:
            if layer in payload.layers:
                bench.pools[payload.name][payload.layers.index(layer), 7] = 200 + layer

    step = bench.step((), compute)
    bench.copies.backup(1, [7], [3], step)
    assert bench.wait(1) == [Completion(1, DONE)]
    assert bench.frame(3) == bench.image(7)
    assert set(bench.frame(3)) == {*range(200, 200 + FULL.num_layers)}


def test_a_load_back_leaves_the_pages_alone_until_the_step_before_has_read_them(bench: Bench) -> None:
    old, seen = bench.image(5), []

    def read(layer: int) -> None:
        torch.cuda._sleep(LONG // 10)
        if layer < LAYERS:
            seen.append(bench.pools["target_kv"][layer, 5].clone())

    step = bench.step((), read)
    bench.copies.load_back(1, [0], [5], step)
    assert bench.wait(1) == [Completion(1, DONE)]
    assert torch.cat(seen).cpu().numpy().tobytes() == old[: LAYERS * SLICE]
    assert set(bench.image(5)) == {POISON}


def test_a_forward_finds_what_its_load_back_brings(bench: Bench) -> None:
    """Much is loaded, and the forward is queued at once: without a wait it would read the old bytes."""
    frames, pages = list(range(FRAMES)), list(range(FRAMES))
    for pool in bench.pools.values():
        pool.fill_(1)
    torch.cuda.synchronize()
    before, seen = bench.step(), []
    bench.copies.load_back(1, frames, pages, before)

    def read(layer: int) -> None:
        if layer < LAYERS:
            seen.append(bench.pools["target_kv"][layer, pages].clone())

    bench.step((1,), read)
    assert bench.wait(1) == [Completion(1, DONE)]
    torch.cuda.synchronize()
    assert all(bool((slices == POISON).all()) for slices in seen)


def test_a_failed_step_fails_its_backup(bench: Bench) -> None:
    hooks = bench.copies.step_hooks(())
    bench.copies.backup(1, [1], [1], hooks)
    hooks.begin()
    hooks.end(True)
    assert bench.wait(1) == [Completion(1, FAILED)]
    assert set(bench.frame(1)) == {POISON}


def test_polling_leaves_no_error_for_torch_to_find(bench: Bench) -> None:
    """An event that is not reached yet sets the thread's last error, which torch checks after its next launch."""
    step = bench.step((), lambda layer: torch.cuda._sleep(LONG // 10))
    bench.copies.backup(1, [1], [1], step)
    polls = 0
    while not bench.copies.poll():
        torch.ones(1, device="cuda").add_(1)
        polls += 1
    assert polls > 0
    torch.cuda.synchronize()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefix_that_went_to_the_host_and_back_gives_equal_logits(backend: str, dtype: torch.dtype) -> None:
    """A real model; its prefix moves to other pages, and the next step is queued before the load-back is over."""
    cuda = torch.device("cuda")
    model = load_model(locate(str(FOLDER)), cuda, dtype)
    plain, tiered = (ModelDriver(model, rows=2, max_tokens=96, backend=backend) for _ in range(2))
    tokens = [3 + 7 * i % 90 for i in range(64)]
    plain.prefill(tokens)
    pool = tiered.pools["target_kv"]
    layout = FrameLayout((PayloadLayout("target_kv", tuple(range(model.config.num_layers)), pool[0, 0].nbytes),))
    slabs = open_slabs(layout, 8)
    copies = cuda_copies(slabs, layout, tiered.pools)
    first = copies.step_hooks(())
    hooked(tiered, first, lambda: tiered.prefill(tokens))
    pages = tiered.table[0, :4].tolist()
    copies.backup(1, pages, [6, 1, 3, 0], first)
    assert wait_for(copies, 1) == [Completion(1, DONE)]
    pool[:, pages] = 1e4
    others = tiered.table[1, :4].tolist()
    torch.cuda.synchronize()
    copies.load_back(2, [6, 1, 3, 0], others, first)
    tiered.table[0, :4] = torch.tensor(others, dtype=torch.int32)
    for token in range(20):
        step = copies.step_hooks([2])
        found = hooked(tiered, step, lambda t=token: tiered.step({0: t}, {}))
        assert torch.equal(found, plain.step({0: token}, {}))
    torch.cuda.synchronize()
    copies.close()
    slabs.close()


def hooked(driver: ModelDriver, hooks: StepHooks, run: Any) -> torch.Tensor:
    """Run the driver's next step with hooks."""
    plain = driver._batch

    def batch(*arguments: Any) -> Any:
        made: LayerHooks = hooks
        return dataclasses.replace(plain(*arguments), hooks=made)

    driver._batch = batch  # type: ignore[method-assign]
    hooks.begin()
    try:
        result: torch.Tensor = run()
    finally:
        hooks.end(False)
        driver._batch = plain  # type: ignore[method-assign]
    return result


@pytest.mark.parametrize("sizes", [(), (1, 4)])
def test_the_runner_s_eager_and_graph_steps_wait_and_report(sizes: tuple[int, ...], cuda: torch.device) -> None:
    bench, script = make_bench(cuda, sizes=sizes), Script()
    bench.runner.warmup()
    layout = FrameLayout((PayloadLayout("target_kv", tuple(range(TINY_LAYERS)), bench.kv[0, 0].nbytes),))
    slabs = open_slabs(layout, NUM_PAGES)
    copies = cuda_copies(slabs, layout, {"target_kv": bench.kv})
    prompt = prompt_of(5, 64)
    script.add(5, prompt)
    first = script.step(prefill=[(5, 64)])
    hooks = copies.step_hooks(())
    pending = bench.runner.submit(first, hooks)
    pages = first.page_table[0, :4].tolist()
    copies.backup(1, pages, [7, 3, 11, 0], hooks)
    tokens = [int(pending.result().tokens[0])]
    assert wait_for(copies, 1) == [Completion(1, DONE)]
    bench.kv[:, pages] = 1e4
    torch.cuda.synchronize()
    moved = [page for page in range(NUM_PAGES) if page not in pages][:4]
    copies.load_back(2, [7, 3, 11, 0], moved, hooks)
    script._pages[5][:4] = moved
    for op in range(3, 8):
        hooks = copies.step_hooks([2])
        tokens.append(int(bench.runner.submit(script.step(decode=[5]), hooks).result().tokens[0]))
        copies.backup(op, moved, [20, 21, 22, 23], hooks)
    assert tokens == bench.model.greedy(prompt, 6)
    assert [done.value for done in wait_for(copies, 6)] == [DONE] * 6
    bench.runner.close()
    copies.close()
    slabs.close()
