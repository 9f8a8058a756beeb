"""From a request's fields to SamplingParams: ranges, the model's defaults, and what depends on the prompt's length."""

import math
from dataclasses import dataclass

from benthic.common.errors import RequestError
from benthic.messages import SamplingParams
from benthic.server.openai.schemas import GenerationFields
from benthic.weights.model_config import GenerationDefaults

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_BIAS = 1024
MAX_HIDDEN_VALUES = 1 << 20  # float32 values in one response: 4 MiB, about 12 MB as JSON
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine can take; known once it is ready."""

    max_request_tokens: int
    limit_reason: str
    vocab_size: int
    hidden_size: int
    max_requests: int  # running and waiting together


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The checked wishes of a request, but for what needs the prompt's length."""

    n: int
    max_tokens: int | None
    stops: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    priority: int
    cache_salt: str
    seed: int | None
    params: SamplingParams  # max_tokens and seed are set later


def read_wanted(
    fields: GenerationFields,
    max_tokens: int | None,
    defaults: GenerationDefaults,
    limits: Limits,
    *,
    max_tokens_name: str = "max_tokens",
    least_max_tokens: int = 1,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Wanted:
    """Check every field but the prompt. Raises RequestError 400 that names the field and the limit."""
    n = _integer("n", fields.n, 1, 1, MAX_CHOICES)
    if max_tokens is not None:
        top = max(limits.max_request_tokens, 1)
        if not least_max_tokens <= max_tokens <= top:
            raise RequestError(
                f"{max_tokens_name} must be from {least_max_tokens} to {top} ({limits.limit_reason}), "
                f"not {_show(max_tokens)}",
                param=max_tokens_name,
            )
    min_tokens = _integer("min_tokens", fields.min_tokens, 0, 0, limits.max_request_tokens)
    if max_tokens is not None and min_tokens > max(max_tokens, 1):
        raise RequestError(
            f"min_tokens {min_tokens} is more than {max_tokens_name} {max_tokens}; lower it", param="min_tokens"
        )
    end_tokens = () if fields.ignore_eos else defaults.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*end_tokens, *_token_ids("stop_token_ids", fields.stop_token_ids, limits))))
    params = SamplingParams(
        max_tokens=0,
        min_tokens=min_tokens,
        temperature=_number("temperature", fields.temperature, _or(defaults.temperature, 1.0), 0.0, 2.0),
        top_p=_number("top_p", fields.top_p, _or(defaults.top_p, 1.0), 0.0, 1.0, open_low=True),
        top_k=_top_k(fields.top_k, defaults.top_k),
        min_p=_number("min_p", fields.min_p, _or(defaults.min_p, 0.0), 0.0, 1.0),
        presence_penalty=_number("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=_number(
            "repetition_penalty",
            fields.repetition_penalty,
            _or(defaults.repetition_penalty, 1.0),
            0.0,
            10.0,
            open_low=True,
        ),
        logit_bias=_logit_bias(fields.logit_bias, limits),
        stop_token_ids=stop_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_hidden_states=bool(fields.return_hidden_states),
    )  # fmt: skip
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    return Wanted(
        n=n,
        max_tokens=max_tokens,
        stops=_stops(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special=fields.skip_special_tokens is not False,
        priority=_integer("priority", fields.priority, 0, -(1 << 31), (1 << 31) - 1),
        cache_salt=_salt(fields.cache_salt),
        seed=None if fields.seed is None else _integer("seed", fields.seed, 0, -_INT64, _INT64 - 1),
        params=params,
    )


def room_for(prompt_tokens: int, wanted: Wanted, limits: Limits, max_tokens_name: str, prompt_name: str) -> int:
    """Tokens to generate at most. Raises RequestError 400 with both numbers where prompt and answer don't fit."""
    limit = limits.max_request_tokens
    room = limit - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens; a request may have {limit} ({limits.limit_reason}), "
            f"at least one of them generated",
            param=prompt_name,
            code="context_length_exceeded",
        )
    if wanted.max_tokens is not None and wanted.max_tokens > room:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and {max_tokens_name} is {wanted.max_tokens}, together "
            f"{prompt_tokens + wanted.max_tokens}; a request may have {limit} ({limits.limit_reason}): "
            f"lower {max_tokens_name} to {room}",
            param=max_tokens_name,
            code="context_length_exceeded",
        )
    tokens = room if wanted.max_tokens is None else max(wanted.max_tokens, 1)
    if wanted.params.min_tokens > tokens:
        raise RequestError(
            f"min_tokens {wanted.params.min_tokens} is more than the {tokens} that fit", param="min_tokens"
        )
    return tokens


def check_hidden_size(wanted: Wanted, max_tokens: int, num_prompts: int, limits: Limits) -> None:
    """Bound what a request with hidden states may bring back. Raises RequestError 400 with the numbers."""
    if not wanted.params.return_hidden_states:
        return
    rows = MAX_HIDDEN_VALUES // max(1, limits.hidden_size)
    choices = wanted.n * num_prompts
    if max_tokens * choices > rows:
        raise RequestError(
            f"return_hidden_states: {max_tokens} tokens x {choices} choices of {limits.hidden_size} values each; a "
            f"response may hold {rows} such rows: set max_tokens to {max(1, rows // choices)} or less",
            param="return_hidden_states",
        )


def check_logprobs(name: str, value: int | None) -> int | None:
    """A count of most likely tokens, or None."""
    return None if value is None else _integer(name, value, 0, 0, MAX_LOGPROBS)


def _or(value: float | None, neutral: float) -> float:
    return neutral if value is None else value


def _show(value: float) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _integer(name: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(f"{name} must be from {low} to {high}, not {_show(value)}", param=name)
    return value


def _number(
    name: str, value: float | None, default: float, low: float, high: float, *, open_low: bool = False
) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bounds = f"above {low} and at most {high}" if open_low else f"from {low} to {high}"
        raise RequestError(f"{name} must be {bounds}, not {_show(value)}", param=name)
    return value


def _top_k(value: int | None, default: int | None) -> int:
    """-1 and 0 both mean off, as clients of either convention send them. A k past the vocabulary is harmless."""
    return max(0, _integer("top_k", value, default or 0, -1, (1 << 31) - 1))


def _token_ids(name: str, ids: list[int] | None, limits: Limits) -> tuple[int, ...]:
    for token in ids or ():
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"{name}: {_show(token)} is not a token; ids go from 0 to {limits.vocab_size - 1}", param=name
            )
    if ids and len(ids) > MAX_BIAS:
        raise RequestError(f"{name} has {len(ids)} entries; at most {MAX_BIAS}", param=name)
    return tuple(ids or ())


def _logit_bias(bias: dict[str, float] | None, limits: Limits) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > MAX_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries; at most {MAX_BIAS}", param="logit_bias")
    parsed = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 12 or int(key) >= limits.vocab_size:
            raise RequestError(
                f"logit_bias: {_show_key(key)} is not a token; ids go from 0 to {limits.vocab_size - 1}",
                param="logit_bias",
            )
        parsed[int(key)] = _number("logit_bias", value, 0.0, -100.0, 100.0)
    return parsed


def _show_key(key: str) -> str:
    return repr(key[:40])


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS}", param="stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop: each string must have from 1 to {MAX_STOP_CHARS} characters, not {len(text)}", param="stop"
            )
    return stops


def _salt(salt: str | None) -> str:
    if salt is not None and not 1 <= len(salt) <= 1024:
        raise RequestError(f"cache_salt must have from 1 to 1024 characters, not {len(salt)}", param="cache_salt")
    return salt or ""
