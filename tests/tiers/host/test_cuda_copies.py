"""What the CUDA mover queues, on a simulated device."""

from pathlib import Path

import pytest
import torch

from benthic.tiers.host import cuda_copies
from benthic.tiers.host.copies import LayeredCopies
from benthic.tiers.host.cuda_copies import CudaMover
from benthic.tiers.host.cudart import DEVICE_TO_HOST, HOST_TO_DEVICE
from benthic.tiers.host.layout import FrameLayout, PayloadLayout
from tests.support.fake_cuda import FakeCuda
from tests.support.host_pools import small_slabs
from tests.tiers.host.test_copies import run_step, wait_for

LAYERS, PAGES = 8, 200
LAYOUT = FrameLayout((PayloadLayout("target_kv", tuple(range(LAYERS)), 16), PayloadLayout("draft_kv", (LAYERS,), 16)))


class Watched(FakeCuda):
    """Counts what is queued and not yet done."""

    most = 0

    def record(self, stream: int) -> object:
        self.most = max(self.most, *(len(queue) for queue in self._streams.values()))
        return super().record(stream)


def make(folder: Path, device: FakeCuda) -> LayeredCopies:
    slabs = small_slabs(folder, LAYOUT.frame_bytes, PAGES)
    slabs.register_cuda(device)
    pools = {p.name: torch.zeros(p.num_layers, PAGES, p.slice_bytes, dtype=torch.uint8) for p in LAYOUT.payloads}
    return LayeredCopies(CudaMover(slabs, LAYOUT, pools, device), LAYOUT.num_layers, num_groups=3)


def test_one_copy_a_page_payload_and_group_and_one_where_all_is_computed(tmp_path: Path) -> None:
    device = FakeCuda()
    copies = make(tmp_path, device)
    step = copies.step_hooks(())
    run_step(step, LAYOUT.num_layers)
    device.stop()  # computed: every event has fired
    copies.backup(1, range(10), range(10), step)
    wait_for(copies, 1)
    assert device.copies == [(DEVICE_TO_HOST, LAYERS, True)] * 10 + [(DEVICE_TO_HOST, 1, True)] * 10
    device.copies.clear()
    copies.load_back(2, range(10), range(10), step, waited=True)
    wait_for(copies, 1)
    heights = [height for kind, height, _ in device.copies if kind == HOST_TO_DEVICE]
    assert heights == [3] * 20 + [2] * 10 + [1] * 10  # layers 0-2, 3-5, then 6 and 7 with the draft's
    copies.close()


def test_no_more_copies_are_queued_than_the_device_takes_without_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copies, "CHUNK_PAGES", 8)
    monkeypatch.setattr(cuda_copies, "MAX_QUEUED", 32)
    device = Watched()
    copies = make(tmp_path, device)
    step = copies.step_hooks(())
    run_step(step, LAYOUT.num_layers)
    copies.backup(1, range(PAGES), range(PAGES), step)
    copies.load_back(2, range(PAGES), range(PAGES), step, waited=True)
    wait_for(copies, 2)
    assert 16 <= device.most <= 32 + 16 + 20  # a chunk of two payloads, and events, may be on top
    copies.close()


def test_a_payload_of_the_draft_layer_leaves_with_that_layer(tmp_path: Path) -> None:
    device = FakeCuda()
    copies = make(tmp_path, device)
    step = copies.step_hooks(())
    copies.backup(1, [4], [7], step)
    step.begin()
    for layer in range(LAYERS):
        step.after_layer(layer)
    for _ in range(100):
        device.work()
    assert [height for _, height, _ in device.copies].count(1) == 0
    step.after_layer(LAYERS)
    step.end(False)
    wait_for(copies, 1)
    assert [height for _, height, _ in device.copies].count(1) == 1
    copies.close()
