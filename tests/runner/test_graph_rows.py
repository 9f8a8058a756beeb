"""Short prefills as rows of a decode graph: what comes out is what an eager step gives, and nobody else is touched."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.attention.triton_backend import TritonBackend
from benthic.runner.graph_rows import graph_rows, prompt_keys
from tests.support.steps import NUM_PAGES, PAGE_SIZE, SLOTS, Bench, Script, make_bench, prompt_of

CPU = torch.device("cpu")
LIMIT = 24


def graphed(**config: Any) -> Bench:
    return make_bench(CPU, sizes=(4, 16, 32), graph_prefill_tokens=LIMIT, **config)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_steps_of_any_mixture_give_what_eager_steps_give(data: st.DataObject) -> None:
    """Sequences begin, go on in chunks and decode, in batches of every kind; each sampled token is compared."""
    benches, script = (make_bench(CPU, sizes=()), graphed()), Script()
    left: dict[int, int] = {}  # prompt tokens to compute, by slot
    running: list[int] = []
    try:
        for _ in range(data.draw(st.integers(2, 6), label="steps")):
            for slot in set(range(4)) - left.keys() - set(running):
                if data.draw(st.booleans(), label=f"{slot} begins"):
                    left[slot] = data.draw(st.integers(1, 40), label="prompt")
                    script.add(slot, prompt_of(slot, left[slot]))
            decode = [s for s in running if data.draw(st.booleans(), label=f"{s} decodes")]
            chunks = [(s, data.draw(st.integers(1, n), label="chunk")) for s, n in left.items()]
            if not decode and not chunks:
                continue
            step = script.step(decode=decode, prefill=chunks, logprobs=0)
            expected, found = (bench.runner.submit(step).result() for bench in benches)
            assert np.array_equal(expected.tokens, found.tokens)
            if expected.logprobs is not None and found.logprobs is not None:
                np.testing.assert_allclose(expected.logprobs.chosen, found.logprobs.chosen, atol=2e-5)
            small = step.num_tokens <= LIMIT
            assert benches[1].model.batch_sizes[-1] in ((4, 16, 32) if small or not chunks else (step.num_tokens,))
            for slot, count in chunks:
                left[slot] -= count
                if not left[slot]:
                    del left[slot]
                    running.append(slot)
    finally:
        for bench in benches:
            bench.runner.close()


def test_only_the_new_pages_scratch_and_the_sampled_slots_change() -> None:
    bench, script = graphed(), Script()
    script.add(3, prompt_of(3, 20))
    script.add(5, prompt_of(5, 40))
    bench.runner.submit(script.step(prefill=[(3, 20)])).result()
    kv, last = bench.kv.clone(), bench.runner._executor._last_tokens.clone()
    step = script.step(decode=[3], prefill=[(5, 9)])  # ends nothing
    bench.runner.submit(step).result()
    changed = (bench.kv != kv).flatten(3).any(-1).any(0).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {*(step.kv_slots // PAGE_SIZE).tolist(), NUM_PAGES}
    slots = (bench.runner._executor._last_tokens[:SLOTS] != last[:SLOTS]).nonzero().flatten().tolist()
    assert set(slots) <= {3}
    bench.runner.close()


def test_rows_are_the_step_s_tokens_in_order() -> None:
    script = Script()
    for slot, length in ((0, 5), (1, 30), (2, 20)):
        script.add(slot, prompt_of(slot, length))
    script.step(prefill=[(0, 5), (1, 17)])
    step = script.step(decode=[0], prefill=[(1, 3), (2, 2)])
    rows = graph_rows(step, SLOTS + 1)
    assert len(rows) == 6
    assert rows.slots.tolist() == [0, SLOTS + 1, SLOTS + 2, SLOTS + 3, SLOTS + 4, SLOTS + 5]
    assert rows.seq_lens.tolist() == [6, 18, 19, 20, 1, 2]
    assert rows.prompt_tokens.tolist() == prompt_of(1, 30)[17:20] + prompt_of(2, 20)[:2]
    assert np.array_equal(rows.page_table[:, 0], step.page_table[[0, 1, 1, 1, 2, 2], 0])
    assert prompt_keys(step) == 18 + 19 + 20 + 1 + 2


def test_what_graphs_cannot_do_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many tokens, log-probabilities of the prompt, too much context; and all prompts where it is off."""
    bench, script = graphed(), Script()
    for slot in range(5):
        script.add(slot, prompt_of(slot, 60))
    prompt = np.array(prompt_of(1, 60), np.int32)
    for step, size in (
        (script.step(prefill=[(0, LIMIT + 1)]), LIMIT + 1),
        (script.step(prefill=[(1, 8)], prompt_logprobs=((0, 7, 0, prompt[1:8]),)), 8),
        (script.step(prefill=[(2, 5)]), 16),
    ):
        bench.runner.submit(step).result()
        assert bench.model.batch_sizes[-1] == size
    monkeypatch.setattr(TritonBackend, "most_prompt_keys", 20)
    bench.runner.submit(script.step(prefill=[(3, 6)])).result()  # 21 positions
    assert bench.model.batch_sizes[-1] == 6
    bench.runner.close()
    off = make_bench(CPU, sizes=(4, 16))  # the default on a CPU
    off.runner.submit(script.step(prefill=[(4, 3)])).result()
    assert off.model.batch_sizes[-1] == 3
    off.runner.close()
