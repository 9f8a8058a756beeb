"""How fast this machine computes prompts, as measured: what the core weighs a reload against."""

import statistics
from collections import deque
from dataclasses import dataclass, field

LEAST_TOKENS = 64  # a shorter chunk says more about a step's fixed cost than about the rate
WINDOW = 8  # steps; their median forgets the first ones, which compile kernels


@dataclass(slots=True)
class PrefillRate:
    """The median over the last long steps that computed prompts alone.

    Long: at least half the longest so far. What is left of a prompt after a hit is a page or two and costs mostly
    launches; a prefix worth reloading would be computed in whole chunks.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # microseconds a token
    longest: int = 0  # tokens of a step

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step without decode rows took so long."""
        if num_tokens < max(LEAST_TOKENS, self.longest / 2):
            return
        if num_tokens >= 2 * self.longest:
            self.recent.clear()  # of steps that are short, as it turns out
        self.longest = max(self.longest, num_tokens)
        self.recent.append(seconds * 1e6 / num_tokens)

    def us_per_page(self, page_tokens: int) -> int:
        """For the tick's broadcast: a whole number, 0 while nothing is known."""
        return int(statistics.median_low(self.recent) * page_tokens) if self.recent else 0
