"""Stands in for the engine process: speaks its protocol, computes nothing.

Greedy requests repeat the bytes of their prompt for ever; others draw from them by (seed, choice, position). A logit
bias of 100 forces its token. Flags make it slow, silent or mortal.
"""

import argparse
import hashlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import zmq

from benthic.messages import (
    Abort,
    Beat,
    CacheState,
    Derived,
    Failed,
    Finished,
    FlushCache,
    FlushDone,
    HiddenStates,
    LaneState,
    Logprobs,
    Outputs,
    Prefilled,
    Progress,
    QueryState,
    Ready,
    Shutdown,
    Stats,
    Stopped,
    Submit,
    ToEngine,
    TokenLogprobs,
    decode_to_engine,
    encode,
)
from benthic.messages.start import decode_start
from tests.support.tiny_text import VOCAB

HIDDEN = 4
PAGE = 16


@dataclass
class Run:
    submit: Submit
    prompt: list[int]
    out: list[int] = field(default_factory=list)


class FakeEngine:
    """One loop: read messages, give each running request a token, send what came of it."""

    def __init__(self, args: argparse.Namespace, push: "zmq.Socket[bytes]", pull: "zmq.Socket[bytes]") -> None:
        self.args, self.push, self.pull = args, push, pull
        self.runs: dict[int, Run] = {}
        self.pages: set[bytes] = set()
        self.generated = self.prompt_tokens = self.cached = self.tick = 0
        self.stopping = False

    def loop(self) -> None:
        last = 0.0
        while not self.stopping:
            if self.pull.poll(0 if self.runs else 200):
                while self.pull.poll(0):
                    self.handle(decode_to_engine(self.pull.recv()))
            if self.runs:
                self.step()
                time.sleep(self.args.token_delay)
            if time.monotonic() - last > 0.2:
                last = time.monotonic()
                self.push.send(encode(self.stats()))

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.runs[message.id] = Run(message, np.frombuffer(message.prompt, "<i4").tolist())
        elif isinstance(message, Abort):
            for one in message.ids:
                self.runs.pop(one, None)
        elif isinstance(message, FlushCache):
            self.push.send(encode(FlushDone(message.token, len(self.pages), 0)))
            self.pages.clear()
        elif isinstance(message, QueryState):
            self.push.send(encode(self.state(message.token)))
        elif isinstance(message, Shutdown):
            self.stopping = True

    def step(self) -> None:
        self.tick += 1
        prefilled, logprobs, hidden, finished, ids, tokens = [], [], [], [], [], []
        for key, run in list(self.runs.items())[: self.args.max_running]:
            params = run.submit.params
            if not run.out:
                prefilled.append(Prefilled(key, self.admit(run), 0.001))
                if params.prompt_logprobs is not None:
                    rows = tuple(position(t, params.prompt_logprobs) for t in run.prompt[1:])
                    logprobs.append(TokenLogprobs(key, True, rows))
            token = next_token(run)
            run.out.append(token)
            self.generated += 1
            ids.append(key)
            tokens.append(token)
            if params.logprobs is not None:
                logprobs.append(TokenLogprobs(key, False, (position(token, params.logprobs),)))
            if params.return_hidden_states:
                hidden.append(HiddenStates(key, np.full(HIDDEN, token, "<f4").tobytes()))
            reason = ends(run)
            if reason:
                finished.append(Finished(key, reason))
                del self.runs[key]
            if self.args.die_after and self.generated >= self.args.die_after:
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.args.fail_after and self.generated >= self.args.fail_after:
                raise RuntimeError("the device is on fire")
        self.push.send(
            encode(
                Outputs(
                    ids=np.asarray(ids, "<i8").tobytes(),
                    tokens=np.asarray(tokens, "<i4").tobytes(),
                    prefilled=tuple(prefilled),
                    logprobs=tuple(logprobs),
                    hidden=tuple(hidden),
                    finished=tuple(finished),
                )
            )
        )

    def admit(self, run: Run) -> int:
        raw = run.submit.hashes
        hashes = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        hits = next((i for i, h in enumerate(hashes) if h not in self.pages), len(hashes))
        self.pages.update(hashes)
        cached = min(hits, (len(run.prompt) - 1) // PAGE) * PAGE
        if run.submit.choice == 0:
            self.prompt_tokens += len(run.prompt)
            self.cached += cached
        return cached

    def lanes(self) -> tuple[LaneState, ...]:
        cached = len(self.pages)
        return (LaneState(lane=0, total=1000, free=1000 - cached, cached=cached, private=0, locked=0),)

    def state(self, token: int) -> CacheState:
        return CacheState(
            token=token,
            tick=self.tick,
            page_size=PAGE,
            nodes=len(self.pages),
            lanes=self.lanes(),
            running=len(self.runs),
            waiting=0,
            hits_tokens_l1=self.cached,
            query_tokens=self.prompt_tokens,
            evicted_pages=0,
            preemptions=0,
            digest="00",
        )

    def stats(self) -> Stats:
        return Stats(
            tick=self.tick,
            running=len(self.runs),
            waiting=0,
            prompt_tokens=self.prompt_tokens,
            cached_tokens_l1=self.cached,
            generated_tokens=self.generated,
            preemptions=0,
            evicted_pages=0,
            lanes=self.lanes(),
            busy_s=0.0,
            host_s=0.0,
            ticks=self.tick,
            slow_ticks=0,
        )


def next_token(run: Run) -> int:
    """The forced token, or the prompt's bytes in turn (greedy) or by a hash of (seed, choice, position)."""
    params = run.submit.params
    forced = [token for token, bias in (params.logit_bias or {}).items() if bias == 100]
    if forced and len(run.out) >= params.min_tokens:
        return forced[0]
    source = [token for token in run.prompt if token < 256] or [ord("x")]
    if params.temperature == 0:
        return source[len(run.out) % len(source)]
    key = f"{params.seed} {run.submit.choice} {len(run.out)}".encode()
    return source[int.from_bytes(hashlib.sha256(key).digest()[:4], "little") % len(source)]


def ends(run: Run) -> str | None:
    params = run.submit.params
    if run.out[-1] in params.stop_token_ids and len(run.out) > params.min_tokens:
        return "stop"
    return "length" if len(run.out) >= params.max_tokens else None


def position(token: int, top: int) -> Logprobs:
    """Made-up numbers that depend on the token alone."""
    ids = tuple((token + i) % VOCAB for i in range(top))
    return Logprobs(token, -0.5 - token % 7, ids, tuple(-0.5 - i for i in range(top)))


def beat(context: "zmq.Context[zmq.Socket[bytes]]", address: str, silent_after: float) -> None:
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    begin = time.monotonic()
    while not silent_after or time.monotonic() - begin < silent_after:
        socket.send(encode(Beat(1, 0.0)))
        time.sleep(0.1)


def lifeline() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--token-delay", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--fail-after", type=int, default=0)
    parser.add_argument("--silent-after", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--refuse", default="")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    order = decode_start(sys.stdin.buffer.readline())
    threading.Thread(target=lifeline, daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.connect(order.send_addr)
    pull.connect(order.recv_addr)
    threading.Thread(target=beat, args=(context, order.send_addr, args.silent_after), daemon=True).start()
    push.send(encode(Progress("weights", 0, 2)))
    time.sleep(args.load_s)
    if args.refuse:
        push.send(encode(Failed(args.refuse)))
        linger(push)
        return 1
    push.send(encode(Progress("weights", 2, 2)))
    push.send(encode(ready(args, order.config.cache.page_size)))
    try:
        FakeEngine(args, push, pull).loop()
    except RuntimeError as error:
        push.send(encode(Failed(f"the engine failed: {error}")))
        linger(push)
        return 1
    push.send(encode(Stopped()))
    linger(push)
    return 0


def linger(push: "zmq.Socket[bytes]") -> None:
    """Close, and give the last message time to arrive: the process ends without ending its context."""
    push.close(linger=1000)
    time.sleep(0.1)


def ready(args: argparse.Namespace, page_size: int) -> Ready:
    return Ready(
        namespace=bytes(32),
        page_size=PAGE,
        max_request_tokens=args.max_tokens,
        limit_reason="the fake's limit",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_running=args.max_running,
        table=(Derived("page_size", str(page_size), "as given"),),
    )


if __name__ == "__main__":
    os._exit(main())  # without waiting for the daemon threads and their sockets
