"""Rotations by position, and the frequencies of each kind."""

import math

import pytest
import torch

from benthic.layers.rope import Rope, default_frequencies, llama3_frequencies

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_each_pair_turns_by_position_times_frequency(device: str) -> None:
    frequencies = default_frequencies(100.0, 8)
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 50, 7])
    rope = Rope(frequencies.to(device), 64)
    turned = rope.turn(x.clone().to(device), 2, rope.angles(positions.to(device), torch.float32)).cpu()
    for token, position in enumerate(positions.tolist()):
        for i in range(4):
            angle = position * 100.0 ** (-2 * i / 8)
            low, high = x[token, :, i], x[token, :, i + 4]
            torch.testing.assert_close(turned[token, :, i], low * math.cos(angle) - high * math.sin(angle))
            torch.testing.assert_close(turned[token, :, i + 4], high * math.cos(angle) + low * math.sin(angle))


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    frequencies = default_frequencies(500000.0, 128)
    stretched = llama3_frequencies(frequencies, 8.0, 1.0, 4.0, 8192)
    wavelengths = 2 * math.pi / frequencies
    assert torch.equal(stretched[wavelengths < 2048], frequencies[wavelengths < 2048])
    assert torch.equal(stretched[wavelengths > 8192], frequencies[wavelengths > 8192] / 8)
    between = (wavelengths > 2048) & (wavelengths < 8192)
    assert between.any()
    assert (stretched[between] < frequencies[between]).all()
    assert (stretched[between] > frequencies[between] / 8).all()
    assert (stretched.diff() < 0).all()
