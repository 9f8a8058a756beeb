"""A request as the scheduler sees it: what arrived, and where it stands.

Replicated state: nothing here is rank-local.
"""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from benthic.forward import Float32, Int32, Int64
from benthic.kvcache import Hold, PageRun
from benthic.messages import SamplingParams, Submit


class State(Enum):
    """Where a request stands. `HELD`: for pages from the disk. `DRAINING`: preempted, with tokens on their way."""

    HELD = auto()
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    DRAINING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Request:
    """One choice of one client request. Owned by the scheduler."""

    id: int
    choice: int
    arrival: int  # rank in arrival order; with `priority` the place in the queue, kept over preemptions
    received_us: int  # on the tick clock
    priority: int
    params: SamplingParams
    root: bytes
    tokens: Int32  # prompt, and after a preemption what was generated too
    prompt_len: int
    hashes: list[bytes]  # content hashes of the whole pages known so far
    stop_ids: Int32
    bias_tokens: Int64 | None = None
    bias_values: Float32 | None = None
    state: State = State.WAITING
    slot: int = -1
    run: PageRun | None = None
    hold: Hold | None = None  # from arrival to admission, where the disk may have pages
    # First pass over the prompt: what was found in the cache. Pages that the request computed itself before a
    # preemption are below `high_water` and no hits.
    high_water: int = 0
    cached_l1: int = 0  # tokens, each in the tier it was found in
    cached_l2: int = 0
    cached_l3: int = 0
    admitted: bool = False
    fresh: bool = True  # no chunk launched since (re)admission
    prefilled: bool = False
    queue_us: int = 0
    prompt_logprobs_sent: int = 0  # next prompt positions whose log-probabilities are launched

    @property
    def order(self) -> tuple[int, int]:
        """Runs earlier, is preempted later."""
        return (self.priority, self.arrival)

    @property
    def limit(self) -> int:
        """Sequence length at which the request ends."""
        return self.prompt_len + self.params.max_tokens

    @property
    def may_match(self) -> bool:
        """Prompt log-probabilities need every prompt row computed, so such a request takes nothing from the cache."""
        return self.params.prompt_logprobs is None


def request_from(message: Submit, arrival: int, now_us: int) -> Request:
    """The request that a Submit asks for."""
    params = message.params
    bias_tokens = bias_values = None
    if params.logit_bias:
        bias_tokens = np.array(list(params.logit_bias.keys()), np.int64)
        bias_values = np.array(list(params.logit_bias.values()), np.float32)
    prompt = np.frombuffer(message.prompt, np.int32)
    return Request(
        id=message.id,
        choice=message.choice,
        arrival=arrival,
        received_us=now_us,
        priority=message.priority,
        params=params,
        root=message.root,
        tokens=prompt,
        prompt_len=len(prompt),
        hashes=[message.hashes[i : i + 32] for i in range(0, len(message.hashes), 32)],
        stop_ids=np.array(params.stop_token_ids, np.int32),
        bias_tokens=bias_tokens,
        bias_values=bias_values,
    )
