"""What goes into a tick of the scheduler and what comes out: plain data, equal on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from benthic.engine.request import Request
from benthic.forward import Bool, Int64, StepOutput
from benthic.kvcache import Agreed, OpId
from benthic.messages import FlushCache, Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens `start … start + count - 1` of a request's sequence are computed in this step."""

    request: Request
    slot: int
    start: int
    count: int
    samples: bool  # the chunk ends the sequence known so far: a token is sampled after it
    first: bool  # the first chunk since admission: device-side state of the slot starts anew
    logprob_start: int = 0  # prompt rows whose distribution over the next prompt token is wanted
    logprob_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: which slots decode, and the prefill chunks. `sample_*` tell whose tokens the step's output are."""

    tick: int
    decode_slots: Int64
    chunks: tuple[PrefillChunk, ...]
    sample_slots: Int64
    sample_epochs: Int64
    sample_hidden: Bool  # rows whose hidden states are wanted
    load_backs: tuple[OpId, ...] = ()  # in flight, into pages that the step reads: its forward waits for these


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step that has come back (rank 0's copy, sent to all)."""

    plan: StepPlan
    output: StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class TickInput:
    """All that the scheduler may look at, besides its own state."""

    tick: int
    now_us: int  # the tick clock: rank 0's, broadcast
    arrivals: tuple[Submit, ...] = ()
    aborts: tuple[int, ...] = ()
    flushes: tuple[FlushCache, ...] = ()
    agreed: tuple[Agreed, ...] = ()  # operations that are over on every rank
    read_us_per_page: int = 0  # rank 0's measured rates; 0: not known
    compute_us_per_page: int = 0
    results: tuple[StepResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes, agreed before the scheduler is built."""

    page_size: int
    max_running: int
    max_request_tokens: int  # prompt + max_tokens of any request
    chunk_tokens: int
    l1_free_pages: int
    queue_timeout_us: int = 0
    step_context_tokens: int = 0  # that a step's prefill rows stand on, together; 0: no bound


def stands_beside(chunks: Sequence[PrefillChunk], start: int, limit: int) -> bool:
    """Whether a chunk with `start` tokens before it may join these; alone it always may. `limit`: 0: no bound."""
    return not limit or not chunks or sum(chunk.start for chunk in chunks) + start <= limit


@dataclass(slots=True)
class Totals:
    """Counters since start. Prompt and cached tokens are counted once a request.

    At the launch of its first pass, for choice 0.
    """

    prompt_tokens: int = 0
    cached_tokens_l1: int = 0
    cached_tokens_l2: int = 0
    cached_tokens_l3: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
