"""Random steps, backups, load-backs and reuse of pages over a device that reorders what it may.

Every byte says whose content it is, in which layer: whatever reads too early, writes too late or copies the wrong place
finds something else.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benthic.kvcache.commands import DONE
from benthic.tiers.host.copies import LayeredCopies, StepHooks
from benthic.tiers.host.cpu_copies import CpuMover
from benthic.tiers.host.cuda_copies import CudaMover
from benthic.tiers.host.layout import FrameLayout, PayloadLayout
from benthic.tiers.host.slabs import POISON
from tests.support.fake_cuda import FakeCuda
from tests.support.host_pools import small_slabs

LAYERS, PAGES, FRAMES, SLICE = 5, 6, 5, 16
LAYOUT = FrameLayout((PayloadLayout("target_kv", tuple(range(LAYERS)), SLICE),))


def byte(content: int, layer: int) -> int:
    """What every byte of a content's slice is."""
    return (content * LAYERS + layer) % 151  # never POISON


class Scene:
    """A core's view of pages and frames, kept by hand, and the device that must agree with it."""

    def __init__(self, folder: Path, mover: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.slabs = small_slabs(folder, LAYOUT.frame_bytes, FRAMES, per_slab=2)
        self.pool = torch.full((LAYERS, PAGES, SLICE), POISON, dtype=torch.uint8)
        pools = {"target_kv": self.pool}
        self.device = None
        if mover == "cpu":
            self.copies = LayeredCopies(CpuMover(self.slabs, LAYOUT, pools), LAYERS, num_groups=3)
        else:
            self.device = FakeCuda(seed, max_pitch=1 << 31)
            self.copies = LayeredCopies(CudaMover(self.slabs, LAYOUT, pools, self.device), LAYERS, num_groups=3)
        for frame in range(FRAMES):
            self.slabs.poison(frame)
        self.pages: dict[int, int] = {}  # page -> content, launched or on its way
        self.frames: dict[int, int] = {}  # frame -> content, committed
        self.busy_pages: dict[int, int] = {}  # page -> operation
        self.loading: dict[int, tuple[int, int]] = {}  # operation -> (frame, page)
        self.saving: dict[int, tuple[int, int]] = {}
        self.next_op = self.next_content = 0
        self.last: StepHooks | None = None
        self.wrong: list[str] = []

    def step(self) -> None:
        """A forward that reads some pages, waits for the load-backs among them, and writes some."""
        reads = self._some(list(self.pages))
        waits = [self.busy_pages[p] for p in reads if self.busy_pages.get(p) in self.loading]
        writes = self._some([page for page in range(PAGES) if page not in self.pages and page not in self.busy_pages])
        expected = {page: self.pages[page] for page in reads}
        written = {page: self._new_content() for page in writes}
        hooks = self.copies.step_hooks(waits)
        hooks.begin()
        replay = self.dice.random() < 0.4
        if replay:
            hooks.before_all()
        for layer in range(LAYERS):
            if not replay:
                hooks.before_layer(layer)
            self._launch(self._kernel(layer, expected, written))
            if not replay:
                hooks.after_layer(layer)
        if replay:
            hooks.after_all()
        hooks.end(False)
        self.pages |= written
        self.last = hooks

    def backup(self) -> None:
        """Some pages that are there, into free frames."""
        pages = [page for page in self._some(list(self.pages)) if page not in self.busy_pages]
        taken = {frame for frame, _ in self.loading.values()} | {frame for frame, _ in self.saving.values()}
        free = [frame for frame in range(FRAMES) if frame not in self.frames and frame not in taken]
        for page, frame in zip(pages, free, strict=False):
            assert self.last is not None
            op = self._new_op()
            self.saving[op] = (frame, page)
            self.busy_pages[page] = op
            self.copies.backup(op, [page], [frame], self.last)

    def load_back(self) -> None:
        """Some committed frames, into free pages."""
        free = [page for page in range(PAGES) if page not in self.pages and page not in self.busy_pages]
        for frame, page in zip(self._some(list(self.frames)), free, strict=False):
            op = self._new_op()
            self.loading[op] = (frame, page)
            self.busy_pages[page] = op
            self.pages[page] = self.frames[frame]
            self.copies.load_back(op, [frame], [page], self.last, waited=op % 2 == 0)

    def drop(self) -> None:
        """Free pages and frames that no operation protects; the core does so at once."""
        for page in self._some([page for page in self.pages if page not in self.busy_pages]):
            del self.pages[page]
        protected = {frame for frame, _ in self.loading.values()}
        for frame in self._some([frame for frame in self.frames if frame not in protected]):
            del self.frames[frame]
            self.slabs.poison(frame)

    def poll(self) -> None:
        """Let a simulated device go on for a while, and settle what has finished."""
        if self.device is not None:
            for _ in range(self.dice.randint(0, 40)):
                self.device.work()
        for done in self.copies.poll():
            assert done.value == DONE
            if done.op in self.loading:
                _, page = self.loading.pop(done.op)
            else:
                frame, page = self.saving.pop(done.op)
                self.frames[frame] = self.pages[page]
                for layer in range(LAYERS):
                    found = set(bytes(self.slabs.frame(frame)[layer * SLICE : (layer + 1) * SLICE]))
                    if found != {byte(self.pages[page], layer)}:
                        self.wrong.append(f"frame {frame} layer {layer}: {found}")
            del self.busy_pages[page]

    def finish(self) -> None:
        """Let everything come to its end."""
        while self.loading or self.saving:
            self.poll()
        self.step()
        self.copies.close()
        if self.device is not None:
            self.device.stop()
        self.slabs.close()

    def _kernel(self, layer: int, reads: dict[int, int], writes: dict[int, int]) -> Callable[[], None]:
        def run() -> None:
            for page, content in reads.items():
                found = set(np.unique(self.pool[layer, page].numpy()).tolist())
                if found != {byte(content, layer)}:
                    self.wrong.append(f"page {page} layer {layer}: {found}, not {byte(content, layer)}")
            for page, content in writes.items():
                self.pool[layer, page] = byte(content, layer)

        return run

    def _launch(self, work: Callable[[], None]) -> None:
        if self.device is None:
            work()
        else:
            self.device.launch(work)

    def _some(self, items: list[int]) -> list[int]:
        return self.dice.sample(items, self.dice.randint(0, len(items)))

    def _new_op(self) -> int:
        self.next_op += 1
        return self.next_op

    def _new_content(self) -> int:
        self.next_content += 1
        return self.next_content


def play(scene: Scene, moves: int) -> Sequence[str]:
    scene.step()
    for _ in range(moves):
        scene.dice.choice([scene.step, scene.step, scene.backup, scene.load_back, scene.drop, scene.poll, scene.poll])()
    scene.finish()
    return scene.wrong


@pytest.mark.parametrize("mover", ["cpu", "cuda"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_nothing_reads_early_or_writes_late(mover: str, seed: int, tmp_path: Path) -> None:
    assert play(Scene(tmp_path, mover, seed), 100) == []


@pytest.mark.parametrize("broken", ["hold", "backup", "load_back"])
def test_the_scene_notices_a_mover_that_leaves_out_a_wait(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the test itself: without any one of the waits it must fail."""
    if broken == "hold":
        monkeypatch.setattr(CudaMover, "hold", lambda self, stream, mark: None)
    else:
        whole = getattr(CudaMover, broken)
        monkeypatch.setattr(CudaMover, broken, lambda self, a, b, layers, after: whole(self, a, b, layers, None))
    assert any(play(Scene(tmp_path, "cuda", seed), 100) for seed in range(20))
