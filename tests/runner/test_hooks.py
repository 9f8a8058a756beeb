"""Steps with hooks: told of every layer in order, ended whatever happens, and equal in what they compute."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benthic.forward import ForwardBatch
from benthic.kvcache.commands import DONE
from benthic.tiers.host.cpu_copies import cpu_copies
from benthic.tiers.host.layout import FrameLayout, PayloadLayout
from tests.support.host_pools import small_slabs
from tests.support.steps import NUM_PAGES, Bench, Script, make_bench, prompt_of
from tests.support.tiny_model import LAYERS, TinyModel

CPU = torch.device("cpu")


class Recorder:
    """Implements forward.LayerHooks; `events` says what was called."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def begin(self) -> None:
        self.events.append("begin")

    def before_layer(self, index: int) -> None:
        self.events.append(("before", index))

    def after_layer(self, index: int) -> None:
        self.events.append(("after", index))

    def before_all(self) -> None:
        self.events.append("before all")

    def after_all(self) -> None:
        self.events.append("after all")

    def end(self, failed: bool) -> None:
        self.events.append(("end", failed))


EAGER = ["begin", *(e for i in range(LAYERS) for e in (("before", i), ("after", i))), ("end", False)]
REPLAY = ["begin", "before all", "after all", ("end", False)]


@pytest.mark.parametrize("sizes", [(), (1, 4)])
def test_a_hooked_step_gives_equal_results_and_tells_of_every_layer(sizes: tuple[int, ...]) -> None:
    tokens, kv = [], []
    for hooked in (False, True):
        bench, script = make_bench(CPU, sizes=sizes), Script()
        script.add(3, prompt_of(3, 20))
        seen = []
        for n in range(6):
            step = script.step(prefill=[(3, 20)]) if n == 0 else script.step(decode=[3])
            hooks = Recorder() if hooked else None
            tokens.append(bench.runner.submit(step, hooks).result().tokens)
            if hooks is not None:
                seen.append(hooks.events)
        if hooked:
            assert seen == [EAGER] + [REPLAY if sizes else EAGER] * 5
        kv.append(bench.kv)
        bench.runner.close()
    assert np.array_equal(tokens[:6], tokens[6:])
    assert torch.equal(kv[0][:, :NUM_PAGES], kv[1][:, :NUM_PAGES])


class Stumbling(TinyModel):
    """Fails at the second forward, between its layers."""

    def __call__(self, batch: ForwardBatch, attention: Any, metadata: Any) -> torch.Tensor:
        if len(self.batch_sizes) == 1:
            assert batch.hooks is not None
            batch.hooks.before_layer(0)
            raise RuntimeError("stumbled")
        return super().__call__(batch, attention, metadata)


def test_hooks_are_ended_where_the_step_fails_and_where_it_never_begins() -> None:
    bench, script = make_bench(CPU, sizes=(), model=Stumbling(CPU)), Script()
    script.add(0, prompt_of(0, 4))
    good, bad, later = Recorder(), Recorder(), Recorder()
    bench.runner.submit(script.step(prefill=[(0, 4)]), good).result()
    for hooks in (bad, later):
        with pytest.raises(RuntimeError, match="stumbled"):
            bench.runner.submit(script.step(decode=[0]), hooks).result()
    assert good.events == EAGER
    assert bad.events == ["begin", ("before", 0), ("end", True)]
    assert later.events == [("end", True)]
    bench.runner.close()


def test_a_hook_that_raises_fails_its_step() -> None:
    class Refusing(Recorder):
        def before_layer(self, index: int) -> None:
            raise OSError("the load-back failed")

    bench, script, hooks = make_bench(CPU, sizes=()), Script(), Refusing()
    script.add(0, prompt_of(0, 4))
    with pytest.raises(OSError, match="the load-back failed"):
        bench.runner.submit(script.step(prefill=[(0, 4)]), hooks).result()
    assert hooks.events == ["begin", ("end", True)]
    bench.runner.close()


def host_tier(bench: Bench, folder: Path) -> Any:
    layout = FrameLayout((PayloadLayout("target_kv", tuple(range(LAYERS)), bench.kv[0, 0].nbytes),))
    slabs = small_slabs(folder, layout.frame_bytes, NUM_PAGES)
    return slabs, cpu_copies(slabs, layout, {"target_kv": bench.kv})


def poll_until(copies: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += copies.poll()
    return found


@pytest.mark.parametrize("sizes", [(), (1, 4)])
def test_a_prefix_that_went_to_the_host_and_came_back_elsewhere_gives_the_same_tokens(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """The pages are overwritten meanwhile; each step is submitted before the copies that it needs are over."""
    bench, script = make_bench(CPU, sizes=sizes), Script()
    slabs, copies = host_tier(bench, tmp_path)
    prompt = prompt_of(5, 64)
    script.add(5, prompt)
    first = script.step(prefill=[(5, 64)])
    hooks = copies.step_hooks(())
    pending = bench.runner.submit(first, hooks)
    pages = first.page_table[0, :4].tolist()
    copies.backup(1, pages, [7, 3, 11, 0], hooks)
    expected = [int(pending.result().tokens[0])]
    assert [done.value for done in poll_until(copies, 1)] == [DONE]
    bench.kv[:, pages] = 1e4  # whoever has the pages now
    moved = [page for page in range(NUM_PAGES) if page not in pages][: len(pages)]
    copies.load_back(2, [7, 3, 11, 0], moved, hooks)
    script._pages[5][:4] = moved
    hooks = copies.step_hooks([2])
    for _ in range(5):
        expected.append(int(bench.runner.submit(script.step(decode=[5]), hooks).result().tokens[0]))
        hooks = copies.step_hooks([2])
    assert expected == bench.model.greedy(prompt, 6)
    bench.runner.close()
    copies.close()
    slabs.close()
