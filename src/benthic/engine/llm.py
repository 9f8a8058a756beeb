"""`LLM`: the engine in the caller's own process, for scripts and benchmarks.

No server, no sockets, the same scheduler and cache.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benthic.common.errors import RequestError
from benthic.config import demand_one_rank, options_from_mapping, resolve
from benthic.engine.build import build_engine
from benthic.engine.core import EngineCore
from benthic.kvcache import page_hashes, root_hash
from benthic.messages import Abort, CacheState, Outputs, Ready, SamplingParams, Submit, ToEngine
from benthic.text.choice import Choice, TextRules
from benthic.text.text_model import CheckpointText
from benthic.tiers.disk.lock import lock_folders
from benthic.weights.locate import locate
from benthic.weights.model_config import read_generation_defaults
from benthic.weights.tokenizer import load_tokenizer

_SAMPLING = frozenset(SamplingParams.__struct_fields__) - {
    "max_tokens",
    "stop_token_ids",
    "logprobs",
    "prompt_logprobs",
    "return_hidden_states",
}
_RANGES = {  # what would fail or mean nothing on the device: least, most
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "repetition_penalty": (1e-6, math.inf),
    "seed": (-(2**63), 2**63 - 1),
}

_ARGUMENTS = frozenset({"max_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "cache_salt"})
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer."""

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the KV cache


@dataclass(slots=True)
class _Running:
    choice: Choice
    tokens: list[int]
    prompt_tokens: int
    cached: int = 0
    finish: str = ""


class LLM:
    """A model, its cache and its scheduler in this process. Use it as a context manager, or call `close`.

    `options` are the engine's flags by name: `LLM("Qwen/Qwen3-0.6B", dtype="float32", page_size=16, l1_size="2GiB")`.
    Raises BenthicError where the model can't be had or does not fit. Not thread-safe.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        given = options_from_mapping({**({"model": model} if model else {}), **options}, "LLM(...)")
        config = resolve(given).engine
        demand_one_rank(config.parallel)
        source = locate(config.model.model)
        self._text = CheckpointText(load_tokenizer(source))
        defaults = read_generation_defaults(source)
        self._end_tokens = defaults.eos_token_ids
        given_by_model = {name: getattr(defaults, name) for name in _MODEL_DEFAULTS}
        self._defaults = {name: value for name, value in given_by_model.items() if value is not None}
        self._seeds = itertools.count(config.model.seed)
        disk = config.cache.disk
        self._lock = None if disk is None else lock_folders(disk.folders, "LLM")
        try:
            self._engine, self._ready = build_engine(config, source)
        except BaseException:
            self._unlock()
            raise
        self._ids = itertools.count()
        self._closed = False

    @property
    def info(self) -> Ready:
        """Limits, and the table of everything that was derived."""
        return self._ready

    @property
    def engine(self) -> EngineCore:
        """The engine itself, for benchmarks that look inside."""
        return self._engine

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the start token where the model has one."""
        return self._text.encode(text, add_special_tokens=True)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for an answer."""
        return self._text.encode(self._text.render_chat(messages, {}), add_special_tokens=False)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
        cache_salt: str | None = None,
        progress: bool = False,
        **sampling: Any,
    ) -> list[Completion]:
        """Answers to `prompts` (texts, or lists of token ids), in order.

        `sampling` are fields of SamplingParams; what is left out is as the model's generation_config.json says.
        Raises RequestError, before anything runs, where a prompt is empty or too long or a field is unknown.
        """
        sampling = self._defaults | sampling
        if unknown := set(sampling) - _SAMPLING:
            raise RequestError(
                f"unknown sampling field {min(unknown)!r}; known: {', '.join(sorted(_SAMPLING | _ARGUMENTS))}"
            )
        if self._closed:
            raise RequestError("this LLM is closed; make a new one")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not all(isinstance(p, str | Sequence) for p in texts):
            raise RequestError("prompts: give a text, a list of texts, or a list of lists of token ids")
        ids = [self.encode(p) if isinstance(p, str) else list(p) for p in texts]
        for i, tokens in enumerate(ids):
            self._check(i, tokens, max_tokens)
        self._check_sampling(sampling, stop_token_ids, max_tokens)
        ends = () if ignore_eos else self._end_tokens
        rules = TextRules(
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=False,
            skip_special=skip_special_tokens,
            strip_start=True,
            end_tokens=frozenset((*ends, *stop_token_ids)),
            min_tokens=sampling.get("min_tokens", 0),
        )
        seed = sampling.pop("seed", None)
        running: dict[int, _Running] = {}
        submits: list[ToEngine] = []
        for tokens in ids:
            params = SamplingParams(
                max_tokens=max_tokens,
                stop_token_ids=tuple(dict.fromkeys((*ends, *stop_token_ids))),
                seed=next(self._seeds) if seed is None else seed,
                **sampling,
            )
            submit = self._submit(tokens, cache_salt, params)
            running[submit.id] = _Running(Choice.open(0, rules, self._text.token_bytes), [], len(tokens))
            submits.append(submit)
        self._run(submits, running, progress)
        return [self._completion(r) for r in running.values()]

    def state(self) -> CacheState:
        """The cache and the queue, as `/cache` shows them."""
        return self._engine.state()

    def close(self, finish_by_s: float = 30.0) -> None:
        """Release the model and its memory; what is on its way to disk gets so many seconds to be written."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + finish_by_s
        while self._engine.unfinished and time.monotonic() < until:
            self._engine.tick([])
            time.sleep(self._engine.pause_s)
        if self._engine.close(max(0.0, until - time.monotonic())):
            self._unlock()  # else a thread that hangs may still write there: the lock goes with the process

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, index: int, tokens: list[int], max_tokens: int) -> None:
        limit = self._ready.max_request_tokens
        if not tokens:
            raise RequestError(
                f"prompt {index} is empty: this model adds no start token, so there is nothing to compute"
            )
        if max_tokens < 1:
            raise RequestError(f"max_tokens {max_tokens}: must be at least 1")
        if len(tokens) + max_tokens > limit:
            raise RequestError(
                f"prompt {index} has {len(tokens)} tokens and max_tokens is {max_tokens}: "
                f"together {len(tokens) + max_tokens}, but a request holds at most {limit} tokens "
                f"(set by {self._ready.limit_reason})"
            )
        if not all(0 <= t < self._ready.vocab_size for t in tokens):
            raise RequestError(f"prompt {index} has a token id outside 0 … {self._ready.vocab_size - 1}")

    def _check_sampling(self, sampling: Mapping[str, Any], stop_token_ids: Sequence[int], max_tokens: int) -> None:
        """The engine trusts its parameters: a token that does not exist would end it."""
        for name, (least, most) in _RANGES.items():
            value = sampling.get(name)
            if value is not None and not (least <= value <= most and math.isfinite(value)):
                raise RequestError(f"{name} {value}: must be from {least:g} to {most:g}")
        if not 0 <= sampling.get("min_tokens", 0) <= max_tokens:
            raise RequestError(f"min_tokens {sampling['min_tokens']}: must be from 0 to max_tokens, {max_tokens}")
        for name, tokens in (("logit_bias", sampling.get("logit_bias") or {}), ("stop_token_ids", stop_token_ids)):
            if wrong := [t for t in tokens if not 0 <= t < self._ready.vocab_size]:
                raise RequestError(f"{name}: {wrong[0]} is not a token; ids go from 0 to {self._ready.vocab_size - 1}")

    def _submit(self, tokens: list[int], salt: str | None, params: SamplingParams) -> Submit:
        prompt = np.array(tokens, np.int32).tobytes()
        root = root_hash(self._ready.namespace, salt)
        hashes = b"".join(page_hashes(root, prompt, self._ready.page_size))
        return Submit(id=next(self._ids), prompt=prompt, root=root, hashes=hashes, params=params)

    def _run(self, submits: list[ToEngine], running: dict[int, _Running], progress: bool) -> None:
        messages = submits
        with _bar(len(running), progress) as advance:
            try:
                while messages or self._engine.computing:
                    time.sleep(self._engine.pause_s)
                    aborts: list[int] = []
                    for reply in self._engine.tick(messages):
                        if isinstance(reply, Outputs):
                            aborts += _take(reply, running)
                            advance(sum(f.reason != "abort" for f in reply.finished) + len(aborts))
                    messages = [Abort(tuple(aborts))] if aborts else []
            except KeyboardInterrupt:  # (a forward that raised has ended the engine: nothing to clean up)
                self._engine.tick([Abort(tuple(running))])
                self._engine.cut_off()
                raise

    def _completion(self, r: _Running) -> Completion:
        piece = r.choice.take()
        text = piece.text if piece else ""
        return Completion(text, r.tokens, r.finish, r.prompt_tokens, r.cached)


def _take(outputs: Outputs, running: dict[int, _Running]) -> list[int]:
    """Add what came to the answers; returns the ids that a stop string has ended."""
    ended = []
    for p in outputs.prefilled:
        running[p.id].cached = p.cached_l1 + p.cached_l2 + p.cached_l3
    ids = np.frombuffer(outputs.ids, np.int64).tolist()
    for request_id, token in zip(ids, np.frombuffer(outputs.tokens, np.int32).tolist(), strict=True):
        r = running[request_id]
        if r.finish:
            continue
        r.tokens.append(token)
        r.choice.push([token])
        if r.choice.finish is not None:
            r.finish = "stop"
            ended.append(request_id)
    for f in outputs.finished:
        r = running[f.id]
        if not r.finish:
            r.choice.end(f.reason)
            r.finish = f.reason
    return ended


@contextlib.contextmanager
def _bar(total: int, show: bool) -> Iterator[Any]:
    if not show:
        yield lambda count: None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
