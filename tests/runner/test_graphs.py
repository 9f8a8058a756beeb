"""Decode graphs on the CPU: padded static buffers give what an eager step gives, and padding touches nobody."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from benthic.runner.graphs import default_graph_sizes
from tests.support.steps import NUM_PAGES, SLOTS, Bench, Script, make_bench, prompt_of
from tests.support.tiny_model import HIDDEN

CPU = torch.device("cpu")


def run_decodes(bench: Bench, num_rows: int, steps: int) -> tuple[np.ndarray, torch.Tensor]:
    """Tokens [steps, rows] of greedy decoding after prompts of odd lengths, and log-probabilities of the last step."""
    script, slots, tokens = Script(), list(range(num_rows)), []
    for slot in slots:
        script.add(slot, prompt_of(slot, 1 + slot * 3))
        bench.runner.submit(script.step(prefill=[(slot, 1 + slot * 3)])).result()
    for _ in range(steps):
        output = bench.runner.submit(script.step(decode=slots[::-1], logprobs=0)).result()
        tokens.append(output.tokens)
    assert output.logprobs is not None
    return np.stack(tokens), torch.from_numpy(output.logprobs.chosen)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 9])
def test_padded_decode_equals_eager_decode(num_rows: int) -> None:
    eager, padded = make_bench(CPU, sizes=()), make_bench(CPU, sizes=(4, 16))
    tokens, logprobs = run_decodes(eager, num_rows, 3)
    padded_tokens, padded_logprobs = run_decodes(padded, num_rows, 3)
    assert padded.model.batch_sizes[-1] == (4 if num_rows <= 4 else 16)
    assert eager.model.batch_sizes[-1] == num_rows
    assert np.array_equal(tokens, padded_tokens)
    torch.testing.assert_close(logprobs, padded_logprobs, atol=1e-5, rtol=1e-5)
    eager.runner.close()
    padded.runner.close()


def test_hidden_states_come_from_their_rows_of_a_padded_batch() -> None:
    found = []
    for sizes in ((), (8,)):
        bench, script = make_bench(CPU, sizes=sizes), Script()
        for slot in (1, 2, 3):
            script.add(slot, prompt_of(slot, 6))
        bench.runner.submit(script.step(prefill=[(1, 6), (2, 6), (3, 6)])).result()
        found.append(bench.runner.submit(script.step(decode=[1, 2, 3], hidden=[2, 1])).result().hidden)
        bench.runner.close()
    assert found[1] is not None
    assert found[1].shape == (2, HIDDEN)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_padding_writes_only_the_scratch_page_and_slot() -> None:
    bench, script = make_bench(CPU, sizes=(8,)), Script()
    script.add(3, prompt_of(3, 20))
    bench.runner.submit(script.step(prefill=[(3, 20)])).result()
    before = bench.kv.clone()
    step = script.step(decode=[3])
    bench.runner.submit(step).result()
    changed = (bench.kv != before).flatten(3).any(-1).any(0).any(1)  # pages
    assert changed.nonzero().flatten().tolist() == [int(step.kv_slots[0]) // 16, NUM_PAGES]
    last_tokens = bench.runner._executor._last_tokens
    assert set(last_tokens.nonzero().flatten().tolist()) <= {3, SLOTS}
    bench.runner.close()


def test_a_batch_over_the_largest_size_runs_eagerly() -> None:
    bench = make_bench(CPU, sizes=(2,))
    run_decodes(bench, 3, 1)
    assert bench.model.batch_sizes[-1] == 3
    assert bench.runner.graph_sizes == (2,)
    bench.runner.close()


def test_stale_table_entries_of_longer_rows_do_no_harm() -> None:
    bench, script = make_bench(CPU, sizes=(2,)), Script()
    script.add(0, prompt_of(0, 64))
    script.add(1, prompt_of(1, 200))
    bench.runner.submit(script.step(prefill=[(0, 64)])).result()
    first = bench.runner.submit(script.step(prefill=[(1, 200)])).result().tokens[0]
    tokens = [first, bench.runner.submit(script.step(decode=[1])).result().tokens[0]]
    bench.runner.submit(script.step(decode=[0])).result()  # a short row where the long one's table was
    tokens.append(bench.runner.submit(script.step(decode=[1, 0])).result().tokens[0])
    assert tokens == bench.model.greedy(prompt_of(1, 200), 3)
    bench.runner.close()


def test_default_sizes_rise_to_max_running() -> None:
    for device in (CPU, torch.device("cuda")):
        for max_running in (1, 3, 8, 33, 256, 300):
            sizes = default_graph_sizes(max_running, device)
            assert list(sizes) == sorted(set(sizes))
            assert sizes[-1] == max_running


def test_the_table_attributes_every_buffer(caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench(CPU, sizes=(2, 4), log_graph_buffers=True)
    with caplog.at_level(logging.INFO, logger="benthic.runner"):
        bench.runner.warmup()
    bench.runner.close()
    (table,) = (r.getMessage() for r in caplog.records if "static buffers" in r.getMessage())
    lines = {line.split()[0]: line for line in table.splitlines() if line.startswith("  ")}
    assert "(4, 4)" in lines["rows"]
    assert "(4, 16)" in lines["page_table"]
    assert "float32" in lines["logits"]
    assert "(4, 101)" in lines["logits"]
    assert "shared with the runner" in lines["last_tokens"]
    own = 4 * 4 * 8 + 4 * 16 * 4 + 4 + 4 * 8 + 4 * 48 * 4 + 4 * 101 * 4
    assert f"{own / 1e6:.3f} MB of buffers" in table
    assert [line.split()[1] for line in table.splitlines() if line.startswith("  batch")] == [
        "2"
    ]  # the CPU captures nothing: one size is run to warm up


def test_memory_is_not_logged_unasked(caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench(CPU, sizes=(2,))
    with caplog.at_level(logging.INFO, logger="benthic.runner"):
        bench.runner.warmup()
    bench.runner.close()
    assert not caplog.records


def test_profiling_without_cuda_says_so_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    bench = make_bench(CPU, sizes=(1, 2), profile_graph_memory=tmp_path)
    bench.runner.warmup()
    bench.runner.close()
    assert [r.getMessage() for r in caplog.records] == ["--profile-graph-memory needs CUDA: nothing is written on cpu"]
    assert not list(tmp_path.iterdir())
