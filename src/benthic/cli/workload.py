"""Seeded prompts and arrival times for the benchmarks: the same seed gives the same run."""

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

from benthic.common.errors import ConfigError

T = TypeVar("T")

# Short and common: about one token each in any English vocabulary.
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into than them
can only other new some could time these two may then do first any my now such like our over man me even most made after
also did many before must through back years where much your way well down should because each just people how too
""".split()  # noqa: SIM905  # a list of a hundred quoted words reads worse


def token_prompts(count: int, length: int, shared: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids, the first `shared` of which are the same in all.

    Ids come from the upper part of `range(vocab_size)`, since special tokens mostly stand first. Raises ConfigError.
    """
    check_lengths(count, length, shared)
    if vocab_size < 2:
        raise ConfigError(f"--vocab-size {vocab_size}: must be at least 2")
    source, lowest = random.Random(seed), min(1000, vocab_size // 2)
    return _with_prefix(count, length, shared, lambda n: [source.randrange(lowest, vocab_size) for _ in range(n)])


def text_prompts(count: int, length: int, shared: int, seed: int) -> list[str]:
    """The same of `length` random English words. Raises ConfigError."""
    check_lengths(count, length, shared)
    source = random.Random(seed)
    return [
        " ".join(p) for p in _with_prefix(count, length, shared, lambda n: [source.choice(_WORDS) for _ in range(n)])
    ]


def arrivals(count: int, rate: float | None, seed: int) -> Iterator[float]:
    """Seconds after the start at which each request is sent: a Poisson process of `rate` a second, or all at once."""
    source, at = random.Random(f"arrivals {seed}"), 0.0
    for _ in range(count):
        yield at
        if rate is not None:
            at += source.expovariate(rate)


def _with_prefix(count: int, length: int, shared: int, draw: Callable[[int], list[T]]) -> list[list[T]]:
    prefix = draw(shared)
    return [prefix + draw(length - shared) for _ in range(count)]


def check_lengths(count: int, length: int, shared: int) -> None:
    """Raises ConfigError where no such prompts can be made."""
    if count < 1:
        raise ConfigError(f"--num-requests {count}: must be at least 1")
    if length < 1:
        raise ConfigError(f"--input-tokens {length}: must be at least 1")
    if not 0 <= shared <= length:
        raise ConfigError(f"--shared-prefix-tokens {shared}: must be from 0 to --input-tokens, {length}")
