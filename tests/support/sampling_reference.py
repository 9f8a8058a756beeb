"""Sampling of one row in plain NumPy float64, as the sampler's module docstring orders it: the exact distribution."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def processed_logits(
    logits: Float64,
    *,
    bias: Mapping[int, float] = {},
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> Float64:
    """Logits after bias and penalties."""
    out = np.array(logits, dtype=np.float64)
    for token, added in bias.items():
        out[token] += added
    for token in set(prompt) | set(output):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token, count in Counter(output).items():
        out[token] -= frequency * count + presence
    return out


def distribution(
    logits: Float64, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Float64:
    """Probabilities that the sampler must draw from. Assumes that no two logits tie."""
    probs = _softmax(logits / temperature)
    if top_k:
        probs[np.argsort(-probs)[top_k:]] = 0
        probs /= probs.sum()
    order = np.argsort(-probs)
    kept, mass = 0, 0.0
    while kept < len(probs) and mass < top_p:
        mass += probs[order[kept]]
        kept += 1
    probs[order[max(kept, 1) :]] = 0
    probs[probs < min_p * probs.max()] = 0
    result: Float64 = probs / probs.sum()
    return result


def _softmax(x: Float64) -> Float64:
    e = np.exp(x - x.max())
    result: Float64 = e / e.sum()
    return result
