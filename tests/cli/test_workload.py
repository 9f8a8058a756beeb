"""Seeded prompts and arrivals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.cli.workload import arrivals, text_prompts, token_prompts
from benthic.common.errors import ConfigError


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 40), st.integers(2, 50000), st.integers(0, 99))
def test_token_prompts(count: int, length: int, shared: int, vocab_size: int, seed: int) -> None:
    shared = min(shared, length)
    prompts = token_prompts(count, length, shared, vocab_size, seed)
    assert prompts == token_prompts(count, length, shared, vocab_size, seed)
    assert [len(p) for p in prompts] == [length] * count
    assert all(p[:shared] == prompts[0][:shared] for p in prompts)
    assert all(0 <= token < vocab_size for p in prompts for token in p)


def test_prompts_differ_after_the_prefix_and_between_seeds() -> None:
    prompts = token_prompts(20, 64, 32, 10000, 1)
    assert len({tuple(p[32:]) for p in prompts}) == 20
    assert prompts != token_prompts(20, 64, 32, 10000, 2)


def test_text_prompts_count_words() -> None:
    prompts = text_prompts(3, 12, 5, 0)
    assert [len(p.split()) for p in prompts] == [12] * 3
    assert len({" ".join(p.split()[:5]) for p in prompts}) == 1
    assert len(set(prompts)) == 3


def test_arrivals_have_the_asked_rate() -> None:
    times = list(arrivals(20001, 50.0, 3))
    assert times == list(arrivals(20001, 50.0, 3))
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] / 20000 == pytest.approx(1 / 50.0, rel=0.05)  # ten standard errors
    assert list(arrivals(3, None, 0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("count", "length", "shared"), [(0, 8, 0), (1, 0, 0), (1, 8, 9), (1, 8, -1)])
def test_impossible_prompts_are_refused_by_flag(count: int, length: int, shared: int) -> None:
    with pytest.raises(ConfigError, match=r"--(num-requests|input-tokens|shared-prefix-tokens)"):
        token_prompts(count, length, shared, 100, 0)
