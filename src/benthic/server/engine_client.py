"""The server's end of the two sockets: sends requests to the engine and hands each tick's outputs to the streams they
belong to.

Nothing here waits for the engine, except the round trips with a bound of their own. All methods run on the event loop.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq
import zmq.asyncio

from benthic.common.errors import EngineDead, RequestError
from benthic.messages import (
    Abort,
    CacheState,
    Finished,
    FlushCache,
    FlushDone,
    FromEngine,
    HiddenStates,
    Logprobs,
    Outputs,
    Prefilled,
    QueryState,
    Submit,
    ToEngine,
    TokenLogprobs,
    decode_from_engine,
    encode,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Feed:
    """What one choice has received and its reader has not taken yet. The client appends, the reader takes."""

    id: int
    wake: asyncio.Event  # shared by the choices of a request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    hidden: list[bytes] = field(default_factory=list)
    prefilled: Prefilled | None = None
    finished: Finished | None = None
    error: RequestError | None = None  # set when the engine is gone or the server cuts the request off

    def take_tokens(self) -> list[int]:
        """The new tokens."""
        taken, self.tokens = self.tokens, []
        return taken


class EngineClient:
    """Owns the sockets, the table of running engine requests, and the count of those that have a place."""

    def __init__(
        self, push: zmq.Socket[bytes], pull: zmq.asyncio.Socket, on_message: Callable[[FromEngine], None]
    ) -> None:
        self._push = push
        self._pull = pull
        self._on_message = on_message  # everything that is not about one request
        self._feeds: dict[int, Feed] = {}
        self._ids = itertools.count(1)
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[CacheState | FlushDone]] = {}
        self._preparing = 0
        self._running = 0  # feeds that have not finished
        self._dead: EngineDead | None = None

    @property
    def outstanding(self) -> int:
        """Engine requests that hold a place: being prepared, waiting or running."""
        return self._preparing + self._running

    def reserve(self, count: int, limit: int) -> None:
        """Take `count` places of `limit`. Raises RequestError: 429 when they are taken, 400 when there are never so
        many."""
        if count > limit:
            raise RequestError(
                f"this request asks for {count} choices at once; the server holds at most {limit}", param="n"
            )
        if self.outstanding + count > limit:
            raise RequestError(
                f"the queue is full: {self.outstanding} requests are running or waiting, at most {limit} may; "
                f"try again later",
                status=429,
                code="queue_full",
            )
        self._preparing += count

    def release(self, count: int) -> None:
        """Give places back that `reserve` took and no feed was opened for."""
        self._preparing -= count

    def open_feeds(self, count: int) -> list[Feed]:
        """`count` feeds with consecutive ids and one wake-up event, on places reserved before."""
        wake = asyncio.Event()
        feeds = [Feed(next(self._ids), wake) for _ in range(count)]
        self._feeds.update((feed.id, feed) for feed in feeds)
        self._preparing -= count
        self._running += count
        return feeds

    def submit(self, requests: Sequence[Submit]) -> None:
        """Send the requests. Raises EngineDead."""
        if self._dead is not None:
            raise self._dead
        for request in requests:
            self.send(request)

    def close_feeds(self, feeds: Sequence[Feed]) -> None:
        """Forget the feeds; what has not finished is aborted."""
        running = tuple(f.id for f in feeds if self._feeds.pop(f.id, None) is not None and f.finished is None)
        self._running -= len(running)
        if running and self._dead is None:
            self.send(Abort(running))

    def fail_all(self, error: RequestError) -> None:
        """End every running request with `error`; the engine is told to drop them if it still lives."""
        feeds = [feed for feed in self._feeds.values() if feed.finished is None]
        for feed in feeds:
            feed.error = feed.error or error
            feed.wake.set()
        if self._dead is None and feeds:
            self.send(Abort(tuple(feed.id for feed in feeds)))

    def engine_died(self, error: EngineDead) -> None:
        """From now on nothing is sent; running requests and round trips end with `error`."""
        self._dead = error
        self.fail_all(RequestError(f"the engine ended: {error}", status=500, code="engine_dead"))
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks (the sockets have no bound of their own, the number of requests has)."""
        try:
            self._push.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("could not send %s to the engine: %s", type(message).__name__, error)

    async def flush(self, tiers: tuple[str, ...], timeout_s: float) -> FlushDone:
        """Drop the copies in these tiers that nobody needs. Raises TimeoutError, EngineDead."""
        token = next(self._tokens)
        answer = await self._ask(token, FlushCache(token, tiers), timeout_s)
        assert isinstance(answer, FlushDone)
        return answer

    async def state(self, timeout_s: float) -> CacheState:
        """The cache's state at the end of the current tick. Raises TimeoutError, EngineDead."""
        token = next(self._tokens)
        answer = await self._ask(token, QueryState(token), timeout_s)
        assert isinstance(answer, CacheState)
        return answer

    async def _ask(self, token: int, message: ToEngine, timeout_s: float) -> CacheState | FlushDone:
        if self._dead is not None:
            raise self._dead
        future: asyncio.Future[CacheState | FlushDone] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            self.send(message)
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            del self._waiting[token]

    async def receive_forever(self) -> None:
        """Read and hand out messages until cancelled."""
        while True:
            self.dispatch(decode_from_engine(await self._pull.recv()))

    def dispatch(self, message: FromEngine) -> None:
        """Hand one message to whom it concerns."""
        if isinstance(message, Outputs):
            self._outputs(message)
            return
        if isinstance(message, CacheState | FlushDone):
            future = self._waiting.get(message.token)
            if future is not None and not future.done():
                future.set_result(message)
        self._on_message(message)

    def _outputs(self, message: Outputs) -> None:
        feeds = self._feeds
        touched: set[asyncio.Event] = set()

        def feed_of(request_id: int) -> Feed | None:
            feed = feeds.get(request_id)
            if feed is not None:
                touched.add(feed.wake)
            return feed

        for prefilled in message.prefilled:
            _add_prefilled(feed_of(prefilled.id), prefilled)
        for logprobs in message.logprobs:
            _add_logprobs(feed_of(logprobs.id), logprobs)
        for hidden in message.hidden:
            _add_hidden(feed_of(hidden.id), hidden)
        ids = np.frombuffer(message.ids, dtype="<i8").tolist()
        tokens = np.frombuffer(message.tokens, dtype="<i4").tolist()
        for request_id, token in zip(ids, tokens, strict=True):
            if (feed := feed_of(request_id)) is not None:
                feed.tokens.append(token)
        for finished in message.finished:
            self._finish(feed_of(finished.id), finished)
        for wake in touched:
            wake.set()

    def _finish(self, feed: Feed | None, finished: Finished) -> None:
        if feed is not None and feed.finished is None:
            feed.finished = finished
            self._running -= 1


def _add_prefilled(feed: Feed | None, prefilled: Prefilled) -> None:
    if feed is not None and feed.prefilled is None:
        feed.prefilled = prefilled


def _add_logprobs(feed: Feed | None, logprobs: TokenLogprobs) -> None:
    if feed is not None:
        (feed.prompt_logprobs if logprobs.is_prompt else feed.logprobs).extend(logprobs.positions)


def _add_hidden(feed: Feed | None, hidden: HiddenStates) -> None:
    if feed is not None:
        feed.hidden.append(hidden.rows)
