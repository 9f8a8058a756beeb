"""Noise that is a pure function of (seed, choice, position, vocabulary index), with the same bits on every device.

Counter-based: a row's key is hashed on the host, and key + index * GOLDEN goes through the SplitMix64 finaliser
(Steele, Lea, Flood 2014) in wrapping int64 arithmetic on the device. No generator state, so a row's noise depends
neither on the rows beside it nor on how often anything was drawn before.
"""

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
_SHIFTS = (30, 27, 31)


def row_keys(seed: NDArray[np.int64], choice: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [S]: one hash of each row's three numbers."""
    key = np.zeros(len(seed), dtype=np.uint64)
    for part in (seed, choice, position):
        key = _mix_host((key ^ part.astype(np.int64).view(np.uint64)) + np.uint64(_GOLDEN))
    return key.view(np.int64)


def index_terms(vocab_size: int, device: torch.device) -> torch.Tensor:
    """int64 [V]: what each vocabulary index adds to a row's key."""
    return (torch.arange(1, vocab_size + 1, dtype=torch.int64) * _signed(_GOLDEN)).to(device)


def noise_bits(keys: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """int64 [S, V] of hashed bits for keys [S] and terms [V]."""
    bits = keys[:, None] + terms[None, :]
    for shift, factor in zip(_SHIFTS, (_MUL_1, _MUL_2, None), strict=True):
        high = bits >> shift  # arithmetic: the mask makes it logical
        bits ^= high.bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            bits *= _signed(factor)
    return bits


def gumbel(keys: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """float32 [S, V] of standard Gumbel noise: -log(e), e exponential from 40 bits (so that the far tail exists)."""
    bits = (noise_bits(keys, terms) >> 24).bitwise_and_((1 << 40) - 1)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-40).clamp_(max=1 - 2.0**-24)  # never 0, never 1
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix_host(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(_SHIFTS[0]))) * np.uint64(_MUL_1)
    z = (z ^ (z >> np.uint64(_SHIFTS[1]))) * np.uint64(_MUL_2)
    return z ^ (z >> np.uint64(_SHIFTS[2]))


def _signed(n: int) -> int:
    """The int64 with the bits of the uint64 `n`."""
    return n - (1 << 64) if n >> 63 else n
