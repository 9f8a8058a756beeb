"""Hidden states as JSON: one list of numbers a generated token."""

import numpy as np

from benthic.server.generation import Generation


def hidden_rows(generation: Generation, index: int) -> list[list[float]]:
    """The rows of one choice, as many as tokens count for it."""
    rows = np.frombuffer(b"".join(generation.feeds[index].hidden), dtype="<f4")
    count = generation.choices[index].num_tokens
    if not rows.size or not count:
        return []
    width = generation.hidden_size
    kept: list[list[float]] = rows.reshape(-1, width)[:count].tolist()
    return kept
