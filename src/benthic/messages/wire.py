"""The messages between the server process and engine rank 0.

Arrays travel as bytes: token ids are little-endian int32, request ids little-endian int64, hashes 32 bytes each.
One `Outputs` message carries everything that one tick produced, so that a tick of 256 running requests is one frame.
"""

from typing import Literal

import msgspec

from benthic.messages.tiers import DiskStats, TierCounters

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. Everything is validated by the server; the engine trusts it."""

    max_tokens: int  # generated tokens at most; prompt + max_tokens is at most the request limit
    min_tokens: int = 0  # end tokens have no probability before this many
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # always set: the server draws one where the client gave none
    presence_penalty: float = 0.0  # OpenAI: over generated tokens
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and generated tokens (CTRL, arXiv:1909.05858)
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()  # includes the model's end tokens unless ignore_eos
    logprobs: int | None = None  # top-k of each generated token's raw distribution; 0: the chosen one only
    prompt_logprobs: int | None = None  # the same for prompt tokens; such a request does not match the prefix cache
    return_hidden_states: bool = False  # last-layer states (after the final norm) of the generated tokens


# --- server -> engine -------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One choice of one request."""

    id: int  # unique for the server's life, rising with arrival
    choice: int = (
        0  # which of the request's `n`; the sampler's noise depends on it, metrics count choice 0's prompt only
    )
    prompt: bytes  # token ids, int32
    root: bytes  # SHA-256(namespace || cache salt): where the chain of content hashes starts
    hashes: bytes  # content hashes of the prompt's whole pages, 32 bytes each
    priority: int = 0  # lower runs first
    params: SamplingParams


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client went away or a stop string was found; frees the request within one tick. Unknown ids are ignored."""

    ids: tuple[int, ...]


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Drop every copy in these tiers that no lock, operation or copy below needs.

    Answered by FlushDone with the same token.
    """

    token: int
    tiers: tuple[str, ...] = ("l1", "l2")  # of l1, l2, l3; each once


class QueryState(msgspec.Struct, frozen=True, tag=True):
    """Ask for a CacheState at the end of the current tick."""

    token: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End in order: abort what runs, make pending spills durable while the time lasts, answer Stopped, exit 0."""

    finish_by_s: float = 0.0  # seconds from receipt that spills may still take; 0: what is not durable yet is lost


ToEngine = Submit | Abort | FlushCache | QueryState | Shutdown

# --- engine -> server -------------------------------------------------------------------------------------------------


class Derived(msgspec.Struct, frozen=True):
    """One row of the start-up table: a value that the user left out, and why it came to be what it is."""

    name: str
    value: str
    reason: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Long work at start-up; drawn as a progress bar. done == total ends it."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Weights loaded, warm-up done, one token generated."""

    namespace: bytes  # 32 bytes; see the overview's glossary
    page_size: int
    max_request_tokens: int  # min(--max-context, what L1's tightest lane holds): prompt + max_tokens at most this
    limit_reason: str  # which of the two bounds, in words, for the error message
    vocab_size: int
    hidden_size: int
    max_running: int
    table: tuple[Derived, ...]


class Prefilled(msgspec.Struct, frozen=True):
    """A request's first pass over its prompt is launched; sent before or with its first token."""

    id: int
    cached_l1: int  # prompt tokens whose KV came from the cache, each in the tier it was found in;
    queue_s: float  # from the engine's receipt to admission
    cached_l2: int = 0  # the three together are never more than the prompt less one
    cached_l3: int = 0


class Finished(msgspec.Struct, frozen=True):
    """The request's last token is in this message or an earlier one; its pages are released."""

    id: int
    reason: FinishReason
    message: str = ""  # for "error"
    status: int = 500  # HTTP status for "error"


class Logprobs(msgspec.Struct, frozen=True):
    """One position: the token's log-probability, its rank, and the most likely tokens (ids and values, best first)."""

    token: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities for a run of positions of one request.

    Generated tokens, or prompt tokens 1… (the first has none).
    """

    id: int
    is_prompt: bool
    positions: tuple[Logprobs, ...]


class HiddenStates(msgspec.Struct, frozen=True):
    """float32 [n, hidden_size] of one request's newly generated tokens, row-major bytes."""

    id: int
    rows: bytes


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that one tick brought. ids[i] generated tokens[i]; a request is named once a token, in order."""

    ids: bytes = b""  # int64
    tokens: bytes = b""  # int32
    prefilled: tuple[Prefilled, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: tuple[HiddenStates, ...] = ()
    finished: tuple[Finished, ...] = ()


class LaneState(msgspec.Struct, frozen=True, kw_only=True):
    """One owner lane of L1 (pages) or L2 (frames). total = free + cached + private."""

    lane: int
    total: int
    free: int
    cached: int  # owned by the tree
    private: int  # of running requests or operations, not in the tree
    locked: int  # cached and under the lock of a request or an operation (or above such a page)


class CacheState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to QueryState, and the payload of /cache."""

    token: int
    tick: int
    page_size: int
    nodes: int
    lanes: tuple[LaneState, ...]
    running: int
    waiting: int
    hits_tokens_l1: int
    query_tokens: int
    evicted_pages: int
    preemptions: int
    digest: str  # hex SHA-256 of the core's state
    held: int = 0  # requests that wait for a reload
    hits_tokens_l2: int = 0
    hits_tokens_l3: int = 0
    l2_lanes: tuple[LaneState, ...] = ()  # none: no host tier
    policy: str = ""  # of L2, as the flag has it; "": no host tier
    tiers: TierCounters = TierCounters()
    disks: tuple[DiskStats, ...] = ()  # one a rank that has a part of the disk floor
    tick_tiers_s: float = 0.0  # scheduler-thread seconds spent on L2 and L3


class FlushDone(msgspec.Struct, frozen=True, tag=True):
    """What a flush did, in pages by tier (l1, l2, l3): those that it was asked for."""

    token: int
    dropped: dict[str, int]
    kept: dict[str, int]  # locked, under an operation, or above such a page
    message: str = ""  # which rank held up L3's part past its bound


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """About once a second. Counters are totals since start; gauges are of the moment."""

    tick: int
    running: int
    waiting: int
    prompt_tokens: int  # of admitted requests' choice 0, each counted once
    cached_tokens_l1: int  # of the same requests
    generated_tokens: int
    preemptions: int
    evicted_pages: int
    lanes: tuple[LaneState, ...]
    busy_s: float  # seconds with a forward under way
    host_s: float  # scheduler-thread seconds in ticks that launched something
    ticks: int
    slow_ticks: int  # over 100 ms of host time
    held: int = 0  # requests that wait for a reload
    cached_tokens_l2: int = 0  # of the same requests as cached_tokens_l1
    cached_tokens_l3: int = 0
    l2_lanes: tuple[LaneState, ...] = ()  # none: no host tier
    tiers: TierCounters = TierCounters()
    disks: tuple[DiskStats, ...] = ()  # one a rank that has a part of the disk floor
    tick_tiers_s: float = 0.0  # scheduler-thread seconds spent on L2 and L3


class Beat(msgspec.Struct, frozen=True, tag=True):
    """From a thread of the engine, once a second whatever the loop does.

    The process lives, and this long in one tick.
    """

    tick: int
    in_tick_s: float
    rank: int = 0


class RankStats(msgspec.Struct, frozen=True, tag=True):
    """About once a second from each rank but the first, whose `Stats` has its own: what only that rank knows."""

    rank: int
    disks: tuple[DiskStats, ...]


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine has released everything and is about to exit 0."""

    unwritten_pages: int = 0  # that were on their way to disk when the time was over: cost a recompute, no more


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine can't start or go on; `message` is for the user's terminal."""

    message: str
    rank: int = 0
    follows: bool = False  # an exchange with another rank broke off: that rank is the one to name


FromEngine = Progress | Ready | Outputs | Stats | RankStats | Beat | CacheState | FlushDone | Stopped | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Parse a frame sent by the server process. Raises msgspec.ValidationError."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Parse a frame sent by the engine. Raises msgspec.ValidationError."""
    return _from_engine.decode(frame)
