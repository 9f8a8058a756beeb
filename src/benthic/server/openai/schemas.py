"""What clients may send: the requests' fields with their types. Ranges and what depends on the model are checked later.

A field that is missing here is either named in UNSUPPORTED (it would change the answer) or unknown; both are refused
by name.
"""

from typing import Any

import msgspec

IGNORED = frozenset({"user", "metadata", "store"})  # accepted: they don't change the answer

UNSUPPORTED = frozenset(
    {
        "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format", "modalities",
        "audio", "prediction", "reasoning_effort", "web_search_options", "verbosity", "service_tier", "suffix",
        "best_of", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    }
)  # fmt: skip


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints share. None: not given, take the model's default."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_hidden_states: bool | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any] | None = None  # text, token ids, or a list of either; read by `read_prompts`
    logprobs: int | None = None
    echo: bool | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Any] | None = None  # read by `read_messages`
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class FlushRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /cache/flush`; may be left out."""

    tiers: list[str] | None = None  # of l1, l2, l3; None: l1 and l2
