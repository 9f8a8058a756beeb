"""The runner on CUDA: graphs against eager, padding, chaining, no waits, memory reports."""

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benthic.kernels.paged_decode.kernel import _combine_kernel, _decode_kernel
from benthic.kernels.paged_prefill.kernel import _prefill_kernel
from benthic.kernels.paged_write.kernel import _paged_write_kernel
from benthic.kernels.rms_norm.kernel import _rms_norm_kernel
from benthic.kernels.rope.kernel import _rope_kernel
from tests.gpu import synchronizing
from tests.support.steps import NUM_PAGES, Bench, Script, make_bench, prompt_of

pytestmark = pytest.mark.gpu


def run_decodes(bench: Bench, slots: list[int], steps: int, **wishes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their log-probabilities, each [steps + 1, slots]; prompts of odd lengths."""
    script, tokens, logprobs = Script(), [], []
    for slot in slots:
        script.add(slot, prompt_of(slot, 1 + slot * 3))
    prefill = script.step(prefill=[(s, 1 + s * 3) for s in slots], logprobs=0, **wishes)
    pending = [bench.runner.submit(prefill)]
    for _ in range(steps):
        pending.append(bench.runner.submit(script.step(decode=slots, logprobs=0, **wishes)))
        output = pending.pop(0).result()
        tokens.append(output.tokens)
        logprobs.append(output.logprobs.chosen)
    output = pending.pop(0).result()
    return np.stack([*tokens, output.tokens]), np.stack([*logprobs, output.logprobs.chosen])


def test_graphs_equal_eager_and_plain_recomputation(cuda: torch.device) -> None:
    eager, graphs = make_bench(cuda, sizes=()), make_bench(cuda, sizes=(1, 4, 16, 33), graph_prefill_tokens=0)
    graphs.runner.warmup()
    for slots in ([5], [0, 1, 2], list(range(10)), list(range(33))):
        eager_tokens, eager_logprobs = run_decodes(eager, slots, 8)
        forwards = len(graphs.model.batch_sizes)
        tokens, logprobs = run_decodes(graphs, slots, 8)
        assert len(graphs.model.batch_sizes) == forwards + 1  # the prefill; decode was replayed
        assert np.array_equal(tokens, eager_tokens)
        np.testing.assert_allclose(logprobs, eager_logprobs, atol=1e-4)
        assert tokens[:, -1].tolist() == eager.model.greedy(prompt_of(slots[-1], 1 + 3 * slots[-1]), 9)
    eager.runner.close()
    graphs.runner.close()


def test_short_prefills_in_graphs_equal_eager_ones(cuda: torch.device) -> None:
    eager, graphs = make_bench(cuda, sizes=()), make_bench(cuda, sizes=(1, 4, 16, 64))
    graphs.runner.warmup()
    script, running = Script(), []
    for slot in range(12):
        script.add(slot, prompt_of(slot, 5 + 9 * slot))
    forwards = len(graphs.model.batch_sizes)
    for slot in range(12):  # chunks of a prompt beside the decode rows of those before it
        left = 5 + 9 * slot
        while left:
            count = min(left, 40)
            step = script.step(decode=running, prefill=[(slot, count)], logprobs=0)
            expected, found = (bench.runner.submit(step).result() for bench in (eager, graphs))
            assert np.array_equal(expected.tokens, found.tokens)
            if found.logprobs is not None:
                np.testing.assert_allclose(found.logprobs.chosen, expected.logprobs.chosen, atol=1e-4)
            left -= count
        running.append(slot)
    assert len(graphs.model.batch_sizes) == forwards  # replays alone
    eager.runner.close()
    graphs.runner.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_batch_size_equals_batch_one(dtype: torch.dtype, cuda: torch.device) -> None:
    bench = make_bench(cuda, dtype=dtype)
    bench.runner.warmup()
    alone = [run_decodes(bench, [slot], 1) for slot in range(33)]
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for rows in range(1, 34):
        tokens, logprobs = run_decodes(bench, list(range(rows)), 1)
        for slot in range(rows):
            if np.array_equal(tokens[:, slot], alone[slot][0][:, 0]):  # in bfloat16 two near candidates may swap
                np.testing.assert_allclose(logprobs[:, slot], alone[slot][1][:, 0], atol=tolerance)
            else:
                assert dtype == torch.bfloat16
    bench.runner.close()


def test_padding_touches_only_the_scratch_page(cuda: torch.device) -> None:
    bench, script = make_bench(cuda, sizes=(16,)), Script()
    bench.runner.warmup()
    script.add(3, prompt_of(3, 20))
    bench.runner.submit(script.step(prefill=[(3, 20)])).result()
    torch.cuda.synchronize()
    before = bench.kv.clone()
    step = script.step(decode=[3])
    bench.runner.submit(step).result()
    torch.cuda.synchronize()
    changed = (bench.kv != before).flatten(3).any(-1).any(0).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {int(step.kv_slots[0]) // 16, NUM_PAGES}
    assert int(step.kv_slots[0]) // 16 in changed
    bench.runner.close()


def test_seeds_decide_in_graphs_as_in_eager_steps(cuda: torch.device) -> None:
    slots = list(range(12))
    wishes = {"temperature": [0.0, 0.8, 1.2] * 4, "top_p": [1.0, 0.9] * 6, "top_k": [0, 0, 20] * 4}
    answers = []
    for sizes in ((), (12,), (32,)):
        bench = make_bench(cuda, sizes=sizes)
        bench.runner.warmup()
        answers.append(run_decodes(bench, slots, 12, **wishes)[0])
        bench.runner.close()
    assert np.array_equal(answers[0], answers[1])
    assert np.array_equal(answers[0], answers[2])


def test_a_decode_step_never_waits_for_the_device(cuda: torch.device) -> None:
    bench = make_bench(cuda)
    bench.runner.warmup()
    run_decodes(bench, [1, 2, 3], 3, temperature=[0, 1, 1], top_p=[1, 0.9, 1])
    with synchronizing.forbidden():
        tokens, _ = run_decodes(bench, [1, 2, 3], 10, temperature=[0, 1, 1], top_p=[1, 0.9, 1])
    assert tokens.shape == (11, 3)
    bench.runner.close()


def test_memory_is_attributed_and_profiled(
    cuda: torch.device, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    bench = make_bench(cuda, sizes=(1, 8), log_graph_buffers=True, profile_graph_memory=tmp_path / "profiles")
    with caplog.at_level(logging.INFO, logger="benthic.runner"):
        bench.runner.warmup()
    bench.runner.close()
    assert "pool growth" in caplog.text
    snapshot = pickle.loads((tmp_path / "profiles" / "graph_memory_decode.pickle").read_bytes())
    assert snapshot["segments"]
    assert snapshot["device_traces"]


@pytest.mark.parametrize("sizes", [None, ()])
def test_nothing_is_compiled_after_warmup(sizes: tuple[int, ...] | None, cuda: torch.device) -> None:
    """A compilation in the middle of serving would hold up every stream for a second."""
    kernels = (_decode_kernel, _combine_kernel, _prefill_kernel, _paged_write_kernel, _rms_norm_kernel, _rope_kernel)

    def compiled() -> list[int]:
        return [len(kernel.device_caches[cuda.index][0]) for kernel in kernels]

    bench, script = make_bench(cuda, sizes=sizes), Script()
    bench.runner.warmup()
    before = compiled()
    slots = list(range(30))
    for slot in slots:
        script.add(slot, prompt_of(slot, 10 + 7 * slot))
        decode = list(range(slot))  # mixed steps of every number of decode rows
        bench.runner.submit(script.step(decode=decode, prefill=[(slot, 10 + 7 * slot)])).result()
    for rows in range(1, 31):
        bench.runner.submit(script.step(decode=slots[:rows])).result()
    assert compiled() == before
    bench.runner.close()
