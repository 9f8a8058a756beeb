"""The runner's thread: order, chaining on the device, failures, and what a step brings back."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benthic.forward import ForwardBatch, PenaltyInit
from benthic.runner.execution import padded_rows
from tests.support.steps import Bench, Script, make_bench, prompt_of
from tests.support.tiny_model import HIDDEN, VOCAB, TinyModel

CPU = torch.device("cpu")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = make_bench(CPU)
    yield made
    made.runner.close()


def test_two_steps_ahead_decode_from_the_device_s_tokens(bench: Bench) -> None:
    """Steps are built and submitted before the tokens they continue from are known to the host."""
    script, tokens = Script(), []
    script.add(5, prompt_of(5, 20))
    pending = [bench.runner.submit(script.step(prefill=[(5, 20)]))]
    for _ in range(20):
        pending.append(bench.runner.submit(script.step(decode=[5])))
        tokens.append(pending.pop(0).result().tokens[0])
    tokens.append(pending.pop(0).result().tokens[0])
    assert tokens == bench.model.greedy(prompt_of(5, 20), 21)


def test_mixed_steps_equal_plain_recomputation(bench: Bench) -> None:
    script = Script()
    out: dict[int, list[int]] = {1: [], 2: [], 3: []}

    def run(slots: list[int], **step: Any) -> None:
        for slot, token in zip(slots, bench.runner.submit(script.step(**step)).result().tokens, strict=True):
            out[slot].append(int(token))

    script.add(1, prompt_of(1, 33))
    script.add(2, prompt_of(2, 50))
    run([1], prefill=[(1, 33), (2, 10)])
    run([1], decode=[1], prefill=[(2, 22)])
    run([1, 2], decode=[1], prefill=[(2, 18)])
    script.add(3, prompt_of(3, 1))
    run([2, 1, 3], decode=[2, 1], prefill=[(3, 1)])
    for _ in range(5):
        run([3, 1, 2], decode=[3, 1, 2])
    lengths = {1: 33, 2: 50, 3: 1}
    for slot, tokens in out.items():
        assert tokens == bench.model.greedy(prompt_of(slot, lengths[slot]), len(tokens))


def test_a_chunk_is_timed_without_touching_anybodys_state(bench: Bench) -> None:
    script = Script()
    script.add(1, prompt_of(1, 33))
    tokens = [bench.runner.submit(script.step(prefill=[(1, 33)])).result().tokens[0]]
    num_tokens, seconds = bench.runner.time_chunk()
    assert num_tokens > 0
    assert seconds > 0
    tokens += [bench.runner.submit(script.step(decode=[1])).result().tokens[0] for _ in range(4)]
    assert tokens == bench.model.greedy(prompt_of(1, 33), 5)


def test_a_chunk_that_ends_no_prompt_samples_nothing(bench: Bench) -> None:
    script = Script()
    script.add(0, prompt_of(0, 30))
    output = bench.runner.submit(script.step(prefill=[(0, 16)])).result()
    assert output.tokens.shape == (0,)
    assert output.tokens.dtype == np.int32
    assert output.logprobs is None


def test_sampling_in_graphs_equals_eager_sampling() -> None:
    """Seeds decide: padding, graphs and company change no token."""
    answers = []
    for sizes in ((), (4, 8)):
        bench, script, rows = make_bench(CPU, sizes=sizes), Script(), []
        for slot in (1, 2, 3):
            script.add(slot, prompt_of(slot, 12))
        wishes = {"temperature": [0.0, 1.0, 0.8], "top_p": [1, 1, 0.9], "seed": [1, 2, 3]}
        rows.append(bench.runner.submit(script.step(prefill=[(1, 12), (2, 12), (3, 12)], **wishes)).result().tokens)
        rows += [bench.runner.submit(script.step(decode=[1, 2, 3], **wishes)).result().tokens for _ in range(15)]
        bench.runner.close()
        answers.append(np.stack(rows))
    assert np.array_equal(*answers)
    assert len(set(answers[0][:, 1])) > 3


def test_penalties_count_tokens_that_the_host_has_not_seen(bench: Bench) -> None:
    script, pending, tokens = Script(), [], []
    script.add(7, prompt_of(7, 9))
    start = (PenaltyInit(slot=7, prompt=np.array(prompt_of(7, 9), np.int32), output=np.zeros(0, np.int32)),)
    penalty = {"penalty_rows": [7], "presence": 1000.0}
    pending.append(bench.runner.submit(script.step(prefill=[(7, 9)], inits=start, **penalty)))
    for _ in range(60):
        pending.append(bench.runner.submit(script.step(decode=[7], **penalty)))
        tokens.append(int(pending.pop(0).result().tokens[0]))
    pending.pop().result()
    assert len(set(tokens)) == len(tokens)


def test_logprobs_and_hidden_states_belong_to_their_rows(bench: Bench) -> None:
    script = Script()
    for slot in (1, 2, 3):
        script.add(slot, prompt_of(slot, 10 + slot))
    step = script.step(prefill=[(1, 11), (2, 12), (3, 13)], logprobs=[2, -1, 0], hidden=[2, 0])
    output = bench.runner.submit(step).result()
    exact = [bench.model.dense(prompt_of(s, 10 + s))[-1].log_softmax(-1) for s in (1, 2, 3)]
    assert output.logprobs is not None
    np.testing.assert_allclose(output.logprobs.chosen[[0, 2]], [exact[0].max(), exact[2].max()], atol=1e-4)
    assert np.isnan(output.logprobs.chosen[1])
    np.testing.assert_allclose(output.logprobs.top[0], exact[0].topk(2).values, atol=1e-4)
    assert output.logprobs.top_ids[0].tolist() == exact[0].topk(2).indices.tolist()
    assert output.hidden is not None
    assert output.hidden.shape == (2, HIDDEN)
    logits = bench.model.logits(torch.from_numpy(output.hidden))
    np.testing.assert_allclose(logits.log_softmax(-1), torch.stack([exact[2], exact[0]]), atol=1e-4)


def test_prompt_logprobs_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr("benthic.runner.execution.PROMPT_LOGPROB_ROWS", 7)
    prompt, script = prompt_of(4, 40), Script()
    script.add(4, prompt)
    script.add(6, prompt_of(6, 5))
    wanted = ((5 + 3, 36, 4, np.array(prompt[4:], np.int32)), (0, 0, 1, np.zeros(0, np.int32)))
    output = bench.runner.submit(script.step(prefill=[(6, 5), (4, 40)], prompt_logprobs=wanted)).result()
    exact = bench.model.dense(prompt).log_softmax(-1)[3:39]
    found, nothing = output.prompt_logprobs
    np.testing.assert_allclose(found.chosen, exact[range(36), prompt[4:]], atol=1e-4)
    np.testing.assert_allclose(found.top, exact.topk(4).values, atol=1e-4)
    assert len(nothing.chosen) == 0


class Stumbling(TinyModel):
    """Fails at the third forward."""

    def __call__(self, batch: ForwardBatch, attention: Any, metadata: Any) -> torch.Tensor:
        if len(self.batch_sizes) == 2:
            raise RuntimeError("stumbled")
        return super().__call__(batch, attention, metadata)


def test_a_failure_reaches_its_step_and_every_later_one() -> None:
    bench, script = make_bench(CPU, model=Stumbling(CPU)), Script()
    script.add(0, prompt_of(0, 4))
    assert bench.runner.submit(script.step(prefill=[(0, 4)])).result().tokens.shape == (1,)
    good = bench.runner.submit(script.step(decode=[0]))
    bad = bench.runner.submit(script.step(decode=[0]))
    assert good.result().tokens.shape == (1,)
    for pending in (bad, bench.runner.submit(script.step(decode=[0]))):
        with pytest.raises(RuntimeError, match="stumbled"):
            pending.result()
    assert bad.done()
    bench.runner.close()


class Gated(TinyModel):
    """Waits for its gate in every forward."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.gate = threading.Event()

    def __call__(self, batch: ForwardBatch, attention: Any, metadata: Any) -> torch.Tensor:
        assert self.gate.wait(60)
        return super().__call__(batch, attention, metadata)


def test_submit_returns_at_once_and_two_may_be_outstanding() -> None:
    model = Gated()
    bench, script = make_bench(CPU, model=model), Script()
    script.add(0, prompt_of(0, 4))
    first = bench.runner.submit(script.step(prefill=[(0, 4)]))
    second = bench.runner.submit(script.step(decode=[0]))
    third = script.step(decode=[0])
    assert not first.done()
    assert not second.done()
    with pytest.raises(AssertionError, match="third step"):
        bench.runner.submit(third)
    model.gate.set()
    tokens = [first.result().tokens[0], second.result().tokens[0], bench.runner.submit(third).result().tokens[0]]
    assert tokens == model.greedy(prompt_of(0, 4), 3)
    assert first.result().tokens[0] == tokens[0]  # again
    bench.runner.close()


def test_warmup_leaves_no_trace() -> None:
    bench, script, seen = make_bench(CPU, sizes=(1, 2, 4)), Script(), []
    bench.runner.warmup(lambda what, done, total: seen.append((what, done, total)))
    assert seen[-1] == ("warm-up", 2, 2)
    assert ("decode graphs", 1, 1) in seen  # the CPU captures nothing: one size warms up
    assert bench.model.batch_sizes == [1, 64, 1]
    assert not bench.kv[:, :-1].any()
    script.add(0, prompt_of(0, 8))
    tokens = [bench.runner.submit(script.step(prefill=[(0, 8)])).result().tokens[0]]
    tokens += [bench.runner.submit(script.step(decode=[0])).result().tokens[0] for _ in range(3)]
    assert tokens == bench.model.greedy(prompt_of(0, 8), 4)
    bench.runner.close()


def test_results_can_be_taken_after_close(bench: Bench) -> None:
    script = Script()
    script.add(0, prompt_of(0, 4))
    pending = bench.runner.submit(script.step(prefill=[(0, 4)], temperature=1.0))
    bench.runner.close()
    assert 0 <= pending.result().tokens[0] < VOCAB
    with pytest.raises(AssertionError, match="closed"):
        bench.runner.submit(script.step(decode=[0]))


def test_eager_steps_come_in_few_sizes_and_add_few_rows() -> None:
    sizes = {padded_rows(rows) for rows in range(1, 513)}
    assert len(sizes) <= 18
    for rows in range(1, 3000):
        assert rows <= padded_rows(rows) < rows + (8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 512 else 128)
