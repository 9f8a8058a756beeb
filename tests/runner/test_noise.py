"""The sampler's noise: pure, well spread, and of the right distribution."""

import numpy as np
import torch

from benthic.runner.noise import gumbel, index_terms, noise_bits, row_keys

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def keys_of(seeds: list[int], choices: list[int], positions: list[int]) -> torch.Tensor:
    return torch.from_numpy(row_keys(*(np.array(x, dtype=np.int64) for x in (seeds, choices, positions))))


def splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_bits_are_splitmix64_of_key_and_index() -> None:
    key = 0
    for part in (5, 1, 1000):
        key = splitmix(((key ^ part) + 0x9E3779B97F4A7C15) & MASK)
    expected = [splitmix((key + (i + 1) * 0x9E3779B97F4A7C15) & MASK) for i in range(50)]
    bits = noise_bits(keys_of([5], [1], [1000]), index_terms(50, CPU))[0]
    assert [b & MASK for b in bits.tolist()] == expected


def test_a_row_s_noise_does_not_depend_on_its_company() -> None:
    terms = index_terms(1000, CPU)
    together = gumbel(keys_of([3, -9, 3], [0, 1, 0], [5, 5, 6]), terms)
    assert torch.equal(together[1], gumbel(keys_of([-9], [1], [5]), terms)[0])
    assert not torch.equal(together[0], together[2])


def test_neighbouring_seeds_choices_and_positions_share_nothing() -> None:
    grid = [(s, c, p) for s in range(4) for c in range(4) for p in range(4)]
    bits = noise_bits(keys_of(*(list(x) for x in zip(*grid, strict=True))), index_terms(500, CPU))
    assert len(bits.flatten().unique()) == bits.numel()
    noise = gumbel(keys_of(*(list(x) for x in zip(*grid, strict=True))), index_terms(500, CPU)).double()
    correlation = torch.corrcoef(noise) - torch.eye(len(grid), dtype=torch.float64)
    assert correlation.abs().max() < 5 / 500**0.5


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(keys_of(list(range(200)), [0] * 200, [0] * 200), index_terms(5000, CPU)).double().flatten()
    uniform = torch.exp(-torch.exp(-noise)).sort().values  # its own distribution function makes it uniform
    steps = (torch.arange(len(uniform), dtype=torch.float64) + 0.5) / len(uniform)
    assert (uniform - steps).abs().max() < 1.63 / len(uniform) ** 0.5  # Kolmogorov-Smirnov, 1 %
    assert noise.isfinite().all()


def test_the_far_tail_exists() -> None:
    noise = gumbel(keys_of(list(range(300)), [0] * 300, [1] * 300), index_terms(200_000, CPU)[:100_000])
    assert noise.max() > 16  # 24 bits would end at 16.6 and be coarse long before
    assert len(noise[noise > 12].unique()) > 100
