"""How fast this machine computes prompts, as measured: what the core weighs a reload against."""

import statistics
from collections import deque
from dataclasses import dataclass, field

LEAST_TOKENS = 64  # a shorter chunk says more about a step's fixed cost than about the rate
WINDOW = 8  # steps; their median forgets the first ones, which compile kernels


@dataclass(slots=True)
class PrefillRate:
    """The median over the last steps that computed prompts alone."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # microseconds a token

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step without decode rows took so long."""
        if num_tokens >= LEAST_TOKENS:
            self.recent.append(seconds * 1e6 / num_tokens)

    def us_per_page(self, page_tokens: int) -> int:
        """For the tick's broadcast: a whole number, 0 while nothing is known."""
        return int(statistics.median_low(self.recent) * page_tokens) if self.recent else 0
