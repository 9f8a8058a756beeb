"""The life of a server process: start the engine's ranks and serve at once, become ready, drain at a signal, end
without a trace.

However it ends, no child, socket or folder is left, and every stream either is complete or ends with an error.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import uvicorn
import uvloop

from benthic.common.errors import BenthicError, EngineDead, RequestError
from benthic.config import Config, Launch
from benthic.messages import Beat, Failed, FromEngine, Progress, RankStats, Ready, Shutdown, Stats, Stopped
from benthic.messages.start import ModelSource
from benthic.observability.metrics import Metrics
from benthic.observability.rank_disks import RankDisks
from benthic.server.app import build_app
from benthic.server.context import ServerContext, TextSide
from benthic.server.engine_client import EngineClient
from benthic.server.engine_process import ENGINE_COMMAND, EngineProcess, describe_exit, name_of
from benthic.server.generation import Seeds
from benthic.server.listen import url_of
from benthic.server.liveness import Bounds, Liveness
from benthic.server.loading import find_model, load_text
from benthic.server.terminal import Terminal
from benthic.server.verdict import LAST_WORDS_S, Verdict

logger = logging.getLogger(__name__)

STOP_S = 10.0  # for the engine to end in order, beyond the grace for requests and spills
TELL_EVERY_S = 5.0  # how often the terminal says that pages are still being written
CLOSE_S = 5  # for connections to take their last bytes
SAME_SIGNAL_S = 1.0  # torchrun sends on what reaches it: a second signal so soon is a copy of the first

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a test replaces: the engine's command, how long it may be silent, and how the model is found and read."""

    engine_command: Sequence[str] = ENGINE_COMMAND
    bounds: Bounds = field(default_factory=Bounds)
    find_model: Callable[[str], ModelSource] = find_model
    load_text: Callable[[ModelSource], TextSide] = load_text


def run_server(
    config: Config,
    sock: socket.socket,
    terminal: Terminal,
    parts: Parts | None = None,
    lock_fds: Sequence[int] = (),
    launch: Launch | None = None,
) -> None:
    """Serve on `sock` until a signal. `lock_fds` hold the disk folders' locks, and the engine inherits them. `launch`:
    the other ranks are processes that torchrun started.

    Raises BenthicError when the engine can't start or has died.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Server(config, sock, terminal, parts or Parts(), lock_fds, launch).run())


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the lifecycle has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Owns the engine's processes, the client, the web server and the state that the endpoints read."""

    def __init__(
        self,
        config: Config,
        sock: socket.socket,
        terminal: Terminal,
        parts: Parts,
        lock_fds: Sequence[int] = (),
        launch: Launch | None = None,
    ) -> None:
        self._config = config
        self._sock = sock
        self._terminal = terminal
        self._parts = parts
        self._lock_fds = tuple(lock_fds)
        self._launch = launch
        self._url = url_of(sock)
        self._engine = EngineProcess(parts.engine_command)
        self._client = EngineClient(self._engine.push, self._engine.pull, self._on_message)
        self._num_ranks = config.engine.parallel.world_size
        self._liveness = Liveness(parts.bounds, self._num_ranks)
        self._verdict = Verdict(self._num_ranks, parts.bounds.follow_s)
        rank_disks = RankDisks()
        self._context = ServerContext(
            model_name=config.server.served_model_name or config.engine.model.model,
            created=int(time.time()),
            api_key=config.server.api_key,
            max_queue=config.engine.scheduler.max_queue,
            client=self._client,
            metrics=Metrics(rank_disks),
            seeds=Seeds(config.engine.model.seed),
            rank_disks=rank_disks,
        )
        self._ready: Ready | None = None
        self._pending_pages = 0  # on their way to disk, as the engine last said
        self._stopped: Stopped | None = None
        self._exits: dict[int, int] = {}  # by rank: statuses of our children that have ended
        self._silence = ""  # which rank hangs, where that came out while the last requests were being finished
        self._signal_at: float | None = None  # the first one
        self._end: asyncio.Future[None]  # set in run: done at a signal, an exception when the engine is lost
        self._engine_broken: asyncio.Event  # a rank has ended or has said that it can't go on
        self._engine_gone: asyncio.Event  # all our children have ended

    async def run(self) -> None:
        """The whole life. Raises BenthicError."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._engine_broken, self._engine_gone = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        web = self._web_server()
        serving = asyncio.create_task(web._serve([self._sock]))
        helpers = [asyncio.create_task(work) for work in (self._boot(), self._receive(), self._watch())]
        self._terminal.line(f"listening on {self._url} (loading {self._context.model_name})")
        try:
            await self._end
            await self._drain()
        except BenthicError as error:
            self._context.state.unhealthy = str(error)
            self._context.metrics.set_ready(False)
            self._client.engine_died(EngineDead(str(error)))
            raise
        finally:
            self._terminal.stop_progress()
            web.should_exit = True
            await asyncio.wait({serving}, timeout=CLOSE_S + 1)
            for task in (*helpers, serving):
                task.cancel()
            await asyncio.gather(*helpers, serving, return_exceptions=True)
            if self._context.text is not None:
                self._context.text.tokenizing.close()
            self._engine.close()

    def _web_server(self) -> uvicorn.Server:
        settings = uvicorn.Config(
            build_app(self._context),
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
            timeout_keep_alive=60,
        )
        return _Uvicorn(settings)

    # --- start -------------------------------------------------------------------------------------------------------

    async def _boot(self) -> None:
        """Find the model, start the engine, read the tokenizer meanwhile."""
        try:
            loop = asyncio.get_running_loop()
            source = await in_daemon_thread(lambda: self._parts.find_model(self._config.engine.model.model))

            def on_exit(rank: int, status: int) -> None:
                with contextlib.suppress(RuntimeError):  # the loop may have closed before
                    loop.call_soon_threadsafe(self._on_exit, rank, status)

            if self._end.done():
                return
            self._engine.start(self._config.engine, source, on_exit, self._lock_fds, self._launch)
            self._context.text = await in_daemon_thread(lambda: self._parts.load_text(source))
            self._maybe_ready()
        except BenthicError as error:
            self._fail(error)
        except Exception as error:  # whatever it was, the server can't come up and must say so
            logger.exception("the server can't start")
            self._fail(EngineDead(f"the server can't start: {type(error).__name__}: {error}"))

    def _maybe_ready(self) -> None:
        text, ready, state = self._context.text, self._ready, self._context.state
        if text is None or ready is None or state.ready is not None or self._end.done():
            return
        state.ready = ready
        self._context.metrics.set_ready(True)
        key = self._config.server.api_key is not None
        self._terminal.ready(
            self._context.model_name, self._url, ready.table, chat=text.tokenizing.model.has_chat_template, key=key
        )

    # --- the engine's messages ---------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        try:
            await self._client.receive_forever()
        except Exception as error:  # an engine whose messages can't be read can't be trusted
            logger.exception("a message of the engine can't be read")
            self._fail(EngineDead(f"a message of the engine can't be read: {type(error).__name__}: {error}"))

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Beat):
            self._liveness.beat(message, asyncio.get_running_loop().time())
        elif isinstance(message, Stats):
            self._pending_pages = message.tiers.spill_pages_pending
            self._context.metrics.update(message)
        elif isinstance(message, RankStats):
            self._context.rank_disks.update(message)
        elif isinstance(message, Progress):
            self._terminal.progress(message.what, message.done, message.total)
        elif isinstance(message, Ready):
            self._ready = message
            self._maybe_ready()
        elif isinstance(message, Failed):
            self._verdict.failed(message, asyncio.get_running_loop().time())
            self._liveness.ended(message.rank)
            self._on_break()
        elif isinstance(message, Stopped):
            self._stopped = message

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._parts.bounds.beat_s / 4))
            fault = self._liveness.fault(asyncio.get_running_loop().time(), ready=self._ready is not None)
            if fault is None:
                continue
            if not self._end.done():
                self._context.state.unhealthy = fault
                self._fail(EngineDead(fault))
            else:
                self._silence = self._silence or fault
                self._engine_broken.set()

    def _on_exit(self, rank: int, status: int) -> None:
        self._exits[rank] = status
        if self._engine.ranks <= self._exits.keys():
            self._engine_gone.set()
        if status != 0 or not self._end.done():  # while we stop, 0 is an end in order
            last_tick = self._liveness.last_tick(rank) if self._ready is not None else ""
            self._verdict.exited(rank, status, last_tick, asyncio.get_running_loop().time())
        self._liveness.ended(rank)
        self._on_break()

    def _on_break(self) -> None:
        """A rank is lost: nothing new can be served, and as soon as the cause is clear the server ends with it."""
        self._engine_broken.set()
        if not self._end.done():
            state = self._context.state
            state.unhealthy = state.unhealthy or self._verdict.told(math.inf)
            self._context.metrics.set_ready(False)
            self._judge()

    def _judge(self) -> None:
        loop = asyncio.get_running_loop()
        if self._end.done():
            return
        if (cause := self._verdict.told(loop.time())) is not None:
            self._fail(EngineDead(cause))
        elif (at := self._verdict.next_look()) is not None:
            loop.call_later(max(0.01, at - loop.time()), self._judge)

    def _fail(self, error: BenthicError) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    # --- end ---------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._signal_at is not None:
            if self._launch is not None and now - self._signal_at < SAME_SIGNAL_S:
                return
            self._engine.kill()  # the user means it
            self._engine.remove_folder()
            os._exit(128 + number)
        self._signal_at = now
        if not self._end.done():
            self._end.set_result(None)

    async def _drain(self) -> None:
        """Refuse new requests, let running ones finish within the grace time, cut the rest off; what is left of the
        time is for pages on their way to disk. Raises EngineDead when the engine dies before the requests have
        ended."""
        loop = asyncio.get_running_loop()
        grace = self._config.server.grace_s
        deadline = loop.time() + grace
        self._context.state.draining = True
        self._context.metrics.set_ready(False)
        if self._client.outstanding:
            self._terminal.line(
                f"stopping: {self._client.outstanding} requests may take up to {grace:g} s; again to end at once"
            )
        while self._client.outstanding and loop.time() < deadline and not self._engine_broken.is_set():
            await asyncio.sleep(0.02)
        if self._client.outstanding and self._engine_broken.is_set():
            raise EngineDead(self._silence or await self._cause("ended while the last requests were being finished"))
        self._client.fail_all(
            RequestError(
                f"the server is shutting down and its grace time of {grace:g} s is over",
                status=503,
                code="shutting_down",
            )
        )
        if not self._engine.ranks:
            return
        if self._ready is None:
            self._engine.hang_up()  # while it loads, the engine reads no messages
            await self._until_gone(STOP_S)
            return
        left = max(0.0, deadline - loop.time())
        self._client.send(Shutdown(finish_by_s=left))
        await self._end_of_spills(left)

    async def _end_of_spills(self, left_s: float) -> None:
        """Wait for the engine's end: `left_s` seconds for pages on their way to disk, and a little to end in order."""
        loop = asyncio.get_running_loop()
        end = loop.time() + left_s + STOP_S
        told_at = -math.inf
        while not self._engine_gone.is_set() and (now := loop.time()) < end:
            if self._pending_pages and self._stopped is None and now - told_at >= TELL_EVERY_S:
                told_at = now
                rest = max(0.0, end - STOP_S - now)
                self._terminal.line(
                    f"{self._pending_pages} pages still being written to disk, for {rest:.0f} s at most"
                )
            await self._until_gone(min(0.2, end - now))
        await self._last_words()
        for rank in sorted(self._engine.ranks - self._exits.keys()):
            name = name_of(rank, self._num_ranks)
            logger.warning("%s did not end in order: it is killed %g s after the grace time", name, STOP_S)
        if self._silence and not self._engine_gone.is_set():
            logger.warning("%s", self._silence)
        for rank, status in self._exits.items():
            if status:
                logger.warning("%s did not end in order: %s", name_of(rank, self._num_ranks), describe_exit(status))
        lost = self._pending_pages if self._stopped is None else self._stopped.unwritten_pages
        if lost:
            self._terminal.line(
                f"{lost} pages were not on disk when the grace time of {self._config.server.grace_s:g} s was over; "
                f"they will be computed again when they are asked for"
            )

    async def _last_words(self) -> None:
        """Raises EngineDead when the engine has gone without a word: its last message may still be in the socket."""
        if not self._engine_gone.is_set():
            return
        end = asyncio.get_running_loop().time() + LAST_WORDS_S
        while self._stopped is None and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        if self._stopped is None:
            raise EngineDead(await self._cause("ended before it had closed the cache"))

    async def _cause(self, what: str) -> str:
        """What became of the engine, and why, as far as the ranks or their ends tell it in time."""
        loop = asyncio.get_running_loop()
        end, cause = loop.time() + self._parts.bounds.follow_s + LAST_WORDS_S, None
        while (now := loop.time()) < end:
            cause = self._verdict.told(now) or self._liveness.fault(now, ready=True)
            if cause is not None:
                break
            await asyncio.sleep(0.02)
        if self._num_ranks == 1:
            failure = self._verdict.failure
            return f"the engine process {what}{failure and ': '}{failure}"
        return f"the engine {what}{cause and ': '}{cause or ''}"

    async def _until_gone(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._engine_gone.wait()


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """The result of `work`; a process that ends doesn't wait for it (a download can't be interrupted)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop may have closed
            loop.call_soon_threadsafe(deliver, result, failed)

    threading.Thread(target=run, daemon=True, name="loading").start()
    return await future
