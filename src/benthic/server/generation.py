"""Runs one request on the engine: one `Submit` a choice, their outputs merged into pieces in the order they come.

Everything that an endpoint needs of a finished or running request is here; the endpoints only give it OpenAI's shape.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from benthic.common.errors import EngineDead, RequestError
from benthic.messages import Logprobs, Submit
from benthic.observability.metrics import Metrics
from benthic.server.engine_client import EngineClient, Feed
from benthic.server.openai.sampling import Wanted
from benthic.server.tokenize import Prompt
from benthic.text.choice import Choice, Piece, TextRules
from benthic.text.token_bytes import TokenBytes


class Seeds:
    """Draws the seeds of requests that bring none, from the server's own seed: a restart with the same one repeats
    them."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def draw(self) -> int:
        """A seed below 2**63."""
        return self._random.getrandbits(63)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: each prompt once, the completions of all choices, cached tokens of each prompt's first
    choice by the tier they were found in."""

    prompt_tokens: int
    completion_tokens: int
    cached_l1: int
    cached_l2: int
    cached_l3: int

    @property
    def cached_tokens(self) -> int:
        """Of all tiers."""
        return self.cached_l1 + self.cached_l2 + self.cached_l3


class Generation:
    """One request under way; owns its feeds and choices. Choices are numbered prompt by prompt."""

    def __init__(
        self, client: EngineClient, table: TokenBytes, metrics: Metrics, hidden_size: int, *, generated: bool = True
    ) -> None:
        self.hidden_size = hidden_size
        self._client = client
        self._table = table
        self._metrics = metrics
        self._generated = generated  # False: the one generated token is dropped (an echo with max_tokens 0)
        self._prompts: Sequence[Prompt] = ()
        self._n = 1
        self._arrival = time.perf_counter()
        self._prefilled: set[int] = set()
        self._last_token: dict[int, float] = {}  # when, by choice
        self.feeds: list[Feed] = []
        self.choices: list[Choice] = []

    def submit(
        self, prompts: Sequence[Prompt], wanted: Wanted, max_tokens: Sequence[int], seeds: Sequence[int], *, chat: bool
    ) -> None:
        """Send every choice of every prompt; max_tokens and seeds are one a prompt. Raises RequestError."""
        self._prompts, self._n = prompts, wanted.n
        rules = TextRules(
            stops=wanted.stops,
            include_stop=wanted.include_stop,
            skip_special=wanted.skip_special,
            strip_start=chat,
            end_tokens=frozenset(wanted.params.stop_token_ids),
            min_tokens=wanted.params.min_tokens,
        )
        self.feeds = self._client.open_feeds(len(prompts) * wanted.n)
        self.choices = [Choice.open(i, rules, self._table) for i in range(len(self.feeds))]
        params = [
            msgspec.structs.replace(wanted.params, max_tokens=tokens, seed=seed)
            for tokens, seed in zip(max_tokens, seeds, strict=True)
        ]
        try:
            self._client.submit(
                [
                    Submit(
                        id=feed.id,
                        choice=i % wanted.n,
                        prompt=prompts[i // wanted.n].ids,
                        root=prompts[i // wanted.n].root,
                        hashes=prompts[i // wanted.n].hashes,
                        priority=wanted.priority,
                        params=params[i // wanted.n],
                    )
                    for i, feed in enumerate(self.feeds)
                ]
            )
        except EngineDead as error:
            self._client.close_feeds(self.feeds)
            raise RequestError(f"the engine ended: {error}", status=503) from None

    def close(self) -> None:
        """Give up what still runs: nothing after `pieces` has ended, all of it when the client went away."""
        for feed, choice in zip(self.feeds, self.choices, strict=True):
            if choice.finish is None:
                self._metrics.count_finish("error" if feed.error or feed.finished else "abort")
        self._client.close_feeds(self.feeds)

    async def started(self) -> bool:
        """Wait until the engine works on the request, or has refused it: then an error can still be a status. Then
        True."""
        while not any(f.prefilled or f.tokens or f.finished or f.error for f in self.feeds):
            await self._wait()
        for feed in self.feeds:
            _raise_error(feed)
        return True

    async def prompts_scored(self) -> None:
        """Wait until the log-probabilities of every prompt are here."""
        while any(not (f.tokens or f.finished or f.error) for f in self.feeds):
            await self._wait()
        for feed in self.feeds:
            _raise_error(feed)

    async def pieces(self) -> AsyncIterator[Piece]:
        """All that is to be sent, until every choice has its finish reason. Raises RequestError when one fails."""
        open_choices = set(range(len(self.choices)))
        while True:
            for i in sorted(open_choices):
                piece = self._advance(self.feeds[i], self.choices[i])
                if piece is None:
                    continue
                if piece.finish is not None:
                    open_choices.discard(i)
                yield piece
            if not open_choices:
                break
            await self._wait()
        self._metrics.observe_end(time.perf_counter() - self._arrival)

    async def _wait(self) -> None:
        wake = self.feeds[0].wake
        await wake.wait()
        wake.clear()

    def _advance(self, feed: Feed, choice: Choice) -> Piece | None:
        _raise_error(feed)
        self._note_prefill(feed, choice)
        tokens = feed.take_tokens()
        if self._generated:
            before = choice.num_tokens
            choice.push(tokens, self._take_logprobs(feed, len(tokens)))
            if tokens:
                self._note_tokens(choice, choice.num_tokens - before)
        if choice.finish is not None:  # a stop string: the engine doesn't know yet
            self._client.close_feeds([feed])
        elif feed.finished is not None:
            choice.end(feed.finished.reason if self._generated else "length")
        piece = choice.take()
        if piece is not None and piece.finish is not None:
            self._metrics.count_finish(piece.finish)
        return piece

    def _take_logprobs(self, feed: Feed, count: int) -> list[Logprobs]:
        """As many as tokens were taken: both come in the same message, so neither runs ahead."""
        taken, feed.logprobs = feed.logprobs[:count], feed.logprobs[count:]
        return taken

    def _note_prefill(self, feed: Feed, choice: Choice) -> None:
        if feed.prefilled is None or choice.index in self._prefilled:
            return
        self._prefilled.add(choice.index)
        self._metrics.observe_queue(feed.prefilled.queue_s)
        if choice.index % self._n == 0:
            prompt = self._prompts[choice.index // self._n]
            self._metrics.count_prompt(
                prompt.num_tokens,
                cached_l1=feed.prefilled.cached_l1,
                cached_l2=feed.prefilled.cached_l2,
                cached_l3=feed.prefilled.cached_l3,
            )

    def _note_tokens(self, choice: Choice, count: int) -> None:
        now = time.perf_counter()
        last = self._last_token.get(choice.index)
        if last is None:
            self._metrics.observe_first(now - self._arrival)
        else:
            self._metrics.observe_gap(now - last, count)
        self._last_token[choice.index] = now
        self._metrics.count_generated(count)

    def usage(self) -> Usage:
        """What has been counted so far."""
        first = [feed.prefilled for feed in self.feeds[:: self._n] if feed.prefilled is not None]
        return Usage(
            prompt_tokens=sum(p.num_tokens for p in self._prompts),
            completion_tokens=sum(c.num_tokens for c in self.choices),
            cached_l1=sum(p.cached_l1 for p in first),
            cached_l2=sum(p.cached_l2 for p in first),
            cached_l3=sum(p.cached_l3 for p in first),
        )


def _raise_error(feed: Feed) -> None:
    if feed.error is not None:
        raise feed.error
    finished = feed.finished
    if finished is not None and finished.reason == "error":
        raise RequestError(finished.message or "the engine failed on this request", status=finished.status)
    if finished is not None and finished.reason == "abort":
        raise RequestError("the engine cut this request off", status=503)
