"""Presence, frequency and repetition penalties: one step against NumPy, counts over several steps, restarts."""

from typing import Any

import numpy as np
import pytest
import torch

from benthic.forward import PenaltyInit
from benthic.runner.sampler import Sampler
from tests.runner.test_sampler import CPU, VOCAB, assert_drawn_from, make_sampler, random_logits
from tests.support.sampling_cases import run_sampler, sampling_input
from tests.support.sampling_reference import distribution, processed_logits

PROMPT, OUTPUT = [1, 2, 2, 30], [2, 5, 5, 5, 7]


def init(slot: int, prompt: list[int] = PROMPT, output: list[int] = OUTPUT) -> PenaltyInit:
    return PenaltyInit(slot=slot, prompt=np.array(prompt, np.int32), output=np.array(output, np.int32))


@pytest.mark.parametrize(
    "strengths",
    [
        {"repetition": 1.4},
        {"repetition": 0.7},
        {"frequency": 0.6},
        {"presence": 1.5},
        {"presence": -0.8, "frequency": 0.3, "repetition": 1.2},
    ],
)
def test_penalized_draws_follow_the_distribution(strengths: dict[str, float]) -> None:
    draws, logits = 3000, random_logits(11)
    sampler = Sampler(vocab_size=VOCAB, num_slots=draws, device=CPU)
    sampling = sampling_input(draws, penalty_rows=np.arange(draws), **strengths)
    inits = tuple(init(slot) for slot in range(draws))
    tokens = run_sampler(sampler, logits.expand(draws, -1), sampling, inits).tokens
    expected = processed_logits(logits[0].double().numpy(), prompt=PROMPT, output=OUTPUT, **strengths)
    assert_drawn_from(tokens, distribution(expected))


def test_only_the_rows_that_ask_are_penalized() -> None:
    logits = random_logits(12, rows=3)
    best = logits.argmax(-1)
    sampling = sampling_input(3, temperature=0, penalty_rows=[-1, 4, -1], presence=[9.0, 9.0, 9.0])
    tokens = run_sampler(make_sampler(), logits, sampling, (init(4, [], [int(best[1])]),)).tokens
    assert tokens[0] == best[0]
    assert tokens[1] == logits[1].topk(2).indices[1]
    assert tokens[2] == best[2]


def greedy_steps(sampler: Sampler, logits: torch.Tensor, steps: int, first: tuple[PenaltyInit, ...]) -> list[list[int]]:
    """Tokens of slots 3 and 0, step after step over the same logits, penalized by what came before."""
    out: list[list[int]] = []
    for step in range(steps):
        sampling = sampling_input(2, temperature=0, penalty_rows=[3, 0], frequency=[0.9, 0.0], repetition=[1.0, 1.5])
        out.append(run_sampler(sampler, logits, sampling, first if step == 0 else ()).tokens.tolist())
    return out


def expected_steps(logits: torch.Tensor, row: int, steps: int, prompt: list[int], output: list[int], **kw: Any) -> list:
    """The same in NumPy."""
    output, out = list(output), []
    for _ in range(steps):
        processed = processed_logits(logits[row].double().numpy(), prompt=prompt, output=output, **kw)
        output.append(int(processed.argmax()))
        out.append(output[-1])
    return out


def test_counts_grow_with_each_sampled_token_and_restart_with_an_init() -> None:
    logits, sampler = random_logits(13, rows=2), make_sampler()
    for prompt, output in ((PROMPT, OUTPUT), ([4], []), ([], [9, 9])):  # a second and third request in the same slots
        tokens = greedy_steps(sampler, logits, 12, (init(3, prompt, output), init(0, prompt, output)))
        assert [t[0] for t in tokens] == expected_steps(logits, 0, 12, prompt, output, frequency=0.9)
        assert [t[1] for t in tokens] == expected_steps(logits, 1, 12, prompt, output, repetition=1.5)


def test_counts_survive_while_other_slots_start() -> None:
    logits, sampler = random_logits(14, rows=1), make_sampler()
    expected = expected_steps(logits, 0, 9, [], [], frequency=1.1)
    for step in range(9):  # a new slot at every step makes the state grow
        sampling = sampling_input(1, temperature=0, penalty_rows=8, frequency=1.1)
        tokens = run_sampler(sampler, logits, sampling, (init(8, [], []) if step == 0 else init(step - 1),)).tokens
        assert tokens.tolist() == [expected[step]]


def test_a_slot_that_nobody_started_is_refused() -> None:
    with pytest.raises(AssertionError, match="PenaltyInit"):
        make_sampler().plan(sampling_input(1, penalty_rows=2, presence=1.0))
