"""The sampler against an independent NumPy reference: distributions, filters, bias, log-probabilities."""

from typing import Any

import numpy as np
import pytest
import torch

from benthic.runner.sampler import Sampler
from tests.support.sampling_cases import logprob_rows, run_sampler, sampling_input
from tests.support.sampling_reference import distribution, processed_logits

CPU = torch.device("cpu")
VOCAB = 40
DRAWS = 4000
CHI_SQUARE_1E4 = {n: 2.0 * n + 40 for n in range(1, VOCAB + 1)}  # above the 1 - 1e-4 quantile for every n up to 40


def make_sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab_size=vocab, num_slots=9, device=CPU)


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def assert_drawn_from(tokens: torch.Tensor, probs: np.ndarray) -> None:
    """Nothing of probability 0 was drawn, and the counts pass a chi-square test (rare tokens pooled)."""
    counts = np.bincount(tokens.numpy(), minlength=len(probs)).astype(float)
    assert counts[probs == 0].sum() == 0
    expected = probs * len(tokens)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < CHI_SQUARE_1E4[len(wanted)], f"chi-square {statistic:.1f} over {len(wanted)} cells"


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB + 5},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.8},
        {"top_k": 12, "min_p": 0.15, "temperature": 0.8},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    ],
)
def test_draws_follow_the_distribution(filters: dict[str, Any]) -> None:
    logits = random_logits(1)
    tokens = run_sampler(make_sampler(), logits.expand(DRAWS, -1), sampling_input(DRAWS, **filters)).tokens
    assert_drawn_from(tokens, distribution(logits[0].double().numpy(), **filters))


def test_rows_with_different_wishes_share_a_batch() -> None:
    logits = random_logits(2)
    wishes: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.6}]
    row_of = np.arange(DRAWS) % (len(wishes) + 1)
    columns = {
        name: np.array([wishes[i].get(name, off) if i < len(wishes) else off for i in row_of])
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    temperature = np.where(row_of < len(wishes), 1.0, 0.0)
    sampling = sampling_input(DRAWS, temperature=temperature, **columns)
    tokens = run_sampler(make_sampler(), logits.expand(DRAWS, -1), sampling).tokens
    for i, wish in enumerate(wishes):
        assert_drawn_from(tokens[row_of == i], distribution(logits[0].double().numpy(), **wish))
    assert (tokens[row_of == len(wishes)] == logits.argmax()).all()


def test_a_row_s_token_does_not_depend_on_its_company() -> None:
    logits = random_logits(3, rows=150)
    rng = np.random.default_rng(0)
    columns = {
        "temperature": rng.choice([0.0, 0.7, 1.3], 150).astype(np.float32),
        "top_k": rng.choice([0, 5, 30], 150).astype(np.int32),
        "top_p": rng.choice([1.0, 0.8], 150).astype(np.float32),
        "min_p": rng.choice([0.0, 0.05], 150).astype(np.float32),
        "seed": rng.integers(-(2**62), 2**62, 150),
        "choice": rng.integers(0, 3, 150),
        "position": rng.integers(0, 9999, 150),
    }
    sampler = make_sampler()
    together = run_sampler(sampler, logits, sampling_input(150, **columns)).tokens
    order = rng.permutation(150)
    shuffled = sampling_input(150, **{k: v[order] for k, v in columns.items()})
    assert torch.equal(run_sampler(sampler, logits[order], shuffled).tokens, together[order])
    for row in range(0, 150, 7):
        alone = sampling_input(1, **{k: v[row : row + 1] for k, v in columns.items()})
        assert run_sampler(sampler, logits[row : row + 1], alone).tokens == together[row]


def test_greedy_takes_the_lowest_index_of_a_tie() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [5, 9]] = 1.0
    logits[2, [0, VOCAB - 1]] = 2.0
    assert run_sampler(make_sampler(), logits, sampling_input(3, temperature=0)).tokens.tolist() == [0, 5, 0]


def test_ties_at_the_border_are_all_kept() -> None:
    logits = torch.full((DRAWS, VOCAB), -5.0)
    logits[:, [3, 8, 20]] = 1.0
    for filters in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5}):
        tokens = run_sampler(make_sampler(), logits, sampling_input(DRAWS, **filters)).tokens
        assert tokens.unique().tolist() == [3, 8, 20]


def test_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = random_logits(4)
    best = int(logits.argmax())
    bias = {best: -np.inf, 11: 2.5, 12: -1.0}
    triples = [(row, token, added) for row in range(0, DRAWS, 2) for token, added in bias.items()]
    sampling = sampling_input(DRAWS, bias=triples)
    tokens = run_sampler(make_sampler(), logits.expand(DRAWS, -1), sampling).tokens
    plain = logits[0].double().numpy()
    assert_drawn_from(tokens[::2], distribution(processed_logits(plain, bias=bias)))
    assert_drawn_from(tokens[1::2], distribution(plain))


def test_a_bias_and_a_ban_of_the_same_token_forbid_it() -> None:
    logits = random_logits(5)
    best = int(logits.argmax())
    sampling = sampling_input(1, temperature=0, bias=[(0, best, 50.0), (0, best, -np.inf)])
    assert run_sampler(make_sampler(), logits, sampling).tokens[0] == logits[0].topk(2).indices[1]


def test_bias_reaches_greedy_rows() -> None:
    sampling = sampling_input(2, temperature=0, bias=[(1, 17, 100.0)])
    tokens = run_sampler(make_sampler(), random_logits(6, rows=2), sampling).tokens
    assert tokens[1] == 17
    assert tokens[0] == random_logits(6, rows=2)[0].argmax()


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(7, rows=4)
    sampling = sampling_input(
        4, temperature=[0, 0.5, 1, 1], top_k=3, bias=[(r, 2, 30.0) for r in range(4)], logprobs=[-1, 2, 0, 5]
    )
    sampled = run_sampler(make_sampler(), logits, sampling)
    found = logprob_rows(sampled)
    exact = logits.double().log_softmax(-1)
    tokens = sampled.tokens.tolist()
    assert tokens == [2] * 4
    np.testing.assert_allclose(found.chosen, [exact[r, tokens[r]] for r in (1, 2, 3)], rtol=1e-5)
    assert found.top_ids.tolist() == exact[1:].topk(5).indices.tolist()
    np.testing.assert_allclose(found.top, exact[1:].topk(5).values, rtol=1e-5)


def test_more_logprobs_than_tokens_give_all_tokens() -> None:
    sampled = run_sampler(make_sampler(7), random_logits(8, vocab=7), sampling_input(1, logprobs=20))
    assert sorted(logprob_rows(sampled).top_ids[0].tolist()) == list(range(7))


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(9, rows=20) * 1000
    tokens = run_sampler(make_sampler(), logits, sampling_input(20, temperature=1e-6)).tokens
    assert torch.equal(tokens, logits.argmax(-1))


def test_forbidden_tokens_are_never_drawn_by_a_flat_row() -> None:
    logits = torch.zeros(DRAWS, VOCAB)
    sampling = sampling_input(DRAWS, bias=[(r, t, -np.inf) for r in range(DRAWS) for t in range(VOCAB) if t != 31])
    assert (run_sampler(make_sampler(), logits, sampling).tokens == 31).all()
