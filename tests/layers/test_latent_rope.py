"""The table of angles: plain, stretched, and YaRN's with its amplitude."""

import math

import pytest
import torch

from benthic.layers import latent_rope
from benthic.layers.latent_rope import latent_frequencies, latent_rope_table
from benthic.weights.rope_config import RopeConfig

# DeepSeek-V3.2's
YARN = RopeConfig(
    theta=10000.0, kind="yarn", factor=40.0, original_max_position=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
    mscale_all_dim=1.0,
)  # fmt: skip


def test_the_table_holds_cosines_then_sines_rounded_once() -> None:
    table = latent_rope_table(RopeConfig(theta=8e6), 16, 70)
    assert table.shape == (70, 16)
    assert table.dtype == torch.float32
    for position in (0, 1, 69):
        for i in range(8):
            angle = position * 8e6 ** (-2 * i / 16)
            expected = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64).float()
            assert torch.equal(table[position, [i, 8 + i]], expected)


def test_far_positions_are_exact_and_parts_join(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = latent_rope_table(RopeConfig(theta=100.0), 4, 1000)
    monkeypatch.setattr(latent_rope, "_POSITIONS_AT_ONCE", 64)
    assert torch.equal(latent_rope_table(RopeConfig(theta=100.0), 4, 1000), whole)
    assert whole[999, 1].item() == pytest.approx(math.cos(999 / 10), abs=1e-7)


def test_linear_divides_every_frequency() -> None:
    plain = latent_frequencies(RopeConfig(theta=10000.0), 32)
    stretched = latent_frequencies(RopeConfig(theta=10000.0, kind="linear", factor=4.0), 32)
    torch.testing.assert_close(stretched, plain / 4)


def test_yarn_keeps_fast_components_and_stretches_slow_ones() -> None:
    """Of 32 pairs, those up to 10 keep their frequency and those from 23 on are divided by 40."""
    plain = latent_frequencies(RopeConfig(theta=10000.0), 64)
    stretched = latent_frequencies(YARN, 64)
    torch.testing.assert_close(stretched[:11], plain[:11])
    torch.testing.assert_close(stretched[23:], plain[23:] / 40)
    ramp = 5 / 13  # of pair 15
    assert stretched[15].item() == pytest.approx(plain[15].item() * (ramp / 40 + 1 - ramp))


def test_yarns_amplitude_is_in_the_table() -> None:
    assert latent_rope_table(YARN, 64, 1)[0, 0].item() == 1.0  # both mscales are equal
    louder = RopeConfig(theta=10000.0, kind="yarn", factor=40.0, original_max_position=4096, mscale=2.0)
    assert latent_rope_table(louder, 64, 1)[0, 0].item() == pytest.approx(0.2 * math.log(40) + 1)
