"""Stands in for the engine's processes: speaks their protocol, computes nothing.

Greedy requests repeat the bytes of their prompt for ever; others draw from them by (seed, choice, position). A logit
bias of 100 forces its token. Flags make it slow, silent or mortal; with several ranks, the rank `--at-rank`.
"""

import argparse
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq

from benthic.messages import (
    Abort,
    Beat,
    CacheState,
    Derived,
    DiskStats,
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
    TierCounters,
    ToEngine,
    TokenLogprobs,
    decode_to_engine,
    encode,
)
from benthic.messages.start import EngineStart, decode_start
from tests.support.fake_ranks import STOP, Follower, Leader, PeerGone, Pulse, a_disk, follow, lost, show_rank
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

    def __init__(
        self, args: argparse.Namespace, link: "Link", leader: Leader, pulse: Pulse, num_lanes: int = 1
    ) -> None:
        self.args, self.push, self.pull = args, link.push, link.pull
        self.leader, self.pulse, self.num_lanes = leader, pulse, num_lanes
        self.runs: dict[int, Run] = {}
        self.pages: set[bytes] = set()
        self.on_disk: set[bytes] = set()
        self.generated = self.prompt_tokens = self.tick = 0
        self.cached = [0, 0, 0]  # tokens by tier
        self.pending = args.pending_pages
        self.stop_at: float | None = None  # when the time for spills is over

    def loop(self) -> None:
        last = 0.0
        while self.stop_at is None or (self.pending and time.monotonic() < self.stop_at):
            if self.stop_at is not None:
                time.sleep(self.args.page_write_s)
                self.pending -= 1
            if self.pull.poll(0 if self.runs or self.stop_at is not None else 200):
                while self.pull.poll(0):
                    self.handle(decode_to_engine(self.pull.recv()))
            self.leader.turn()
            self.pulse.tick += 1
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
            self.push.send(encode(self.flush(message)))
        elif isinstance(message, QueryState):
            self.push.send(encode(self.state(message.token)))
        elif isinstance(message, Shutdown):
            self.runs.clear()
            self.stop_at = time.monotonic() + message.finish_by_s
            if self.args.die_at_stop:
                os.kill(os.getpid(), signal.SIGKILL)

    def step(self) -> None:
        self.tick += 1
        prefilled, logprobs, hidden, finished, ids, tokens = [], [], [], [], [], []
        for key, run in list(self.runs.items())[: self.args.max_running]:
            params = run.submit.params
            if not run.out:
                l1, l2, l3 = self.admit(run)
                prefilled.append(Prefilled(key, l1, 0.001, cached_l2=l2, cached_l3=l3))
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
            if self.args.part_after and self.generated >= self.args.part_after:
                raise PeerGone
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

    def admit(self, run: Run) -> tuple[int, int, int]:
        """Cached tokens by tier: what a flush took from L1 is found on disk, where there is one."""
        raw = run.submit.hashes
        hashes = [raw[i : i + 32] for i in range(0, len(raw), 32)]
        known = self.pages | self.on_disk
        hits = next((i for i, h in enumerate(hashes) if h not in known), len(hashes))
        cached = hashes[: min(hits, (len(run.prompt) - 1) // PAGE)]
        in_l1 = sum(h in self.pages for h in cached)
        counts = (in_l1 * PAGE, 0, (len(cached) - in_l1) * PAGE)
        self.pages.update(hashes)
        if self.args.disk:
            self.on_disk.update(hashes)
        if run.submit.choice == 0:
            self.prompt_tokens += len(run.prompt)
            self.cached = [a + b for a, b in zip(self.cached, counts, strict=True)]
        return counts

    def flush(self, message: FlushCache) -> FlushDone:
        held = {"l1": self.pages, "l2": set(), "l3": self.on_disk}
        dropped = {tier: len(held[tier]) for tier in message.tiers}
        for tier in message.tiers:
            held[tier].clear()
        hint = self.args.flush_message if "l3" in message.tiers else ""
        return FlushDone(message.token, dropped, dict.fromkeys(message.tiers, 0), hint)

    def lanes(self) -> tuple[LaneState, ...]:
        n = self.num_lanes
        each = [(len(self.pages) + n - 1 - lane) // n for lane in range(n)]
        return tuple(
            LaneState(lane=lane, total=1000, free=1000 - cached, cached=cached, private=0, locked=0)
            for lane, cached in enumerate(each)
        )

    def l2_lanes(self) -> tuple[LaneState, ...]:
        lane = LaneState(lane=0, total=500, free=480, cached=15, private=5, locked=3)
        return (lane,) if self.args.disk else ()

    def counters(self) -> TierCounters:
        return TierCounters(spill_pages_pending=self.pending, spill_nodes_listed=self.pending, in_flight={"durable": 1})

    def disks(self) -> tuple[DiskStats, ...]:
        if not self.args.disk:
            return ()
        known = {
            "slots_used": len(self.on_disk), "write_errors": 2, "read_failures": {"checksum": 3},
            "out_of_service": self.args.out_of_service, "last_error": "EIO: disk on fire",
        }  # fmt: skip
        return (a_disk(0, **known),)

    def state(self, token: int) -> CacheState:
        return CacheState(
            token=token,
            tick=self.tick,
            page_size=PAGE,
            nodes=len(self.pages),
            lanes=self.lanes(),
            running=len(self.runs),
            waiting=0,
            hits_tokens_l1=self.cached[0],
            hits_tokens_l2=self.cached[1],
            hits_tokens_l3=self.cached[2],
            query_tokens=self.prompt_tokens,
            evicted_pages=0,
            preemptions=0,
            digest="00",
            held=2 if self.args.disk else 0,
            l2_lanes=self.l2_lanes(),
            policy="write_through" if self.args.disk else "",
            tiers=self.counters(),
            disks=self.disks(),
        )

    def stats(self) -> Stats:
        return Stats(
            tick=self.tick,
            running=len(self.runs),
            waiting=0,
            prompt_tokens=self.prompt_tokens,
            cached_tokens_l1=self.cached[0],
            cached_tokens_l2=self.cached[1],
            cached_tokens_l3=self.cached[2],
            generated_tokens=self.generated,
            preemptions=0,
            evicted_pages=0,
            lanes=self.lanes(),
            busy_s=0.0,
            host_s=0.0,
            ticks=self.tick,
            slow_ticks=0,
            held=2 if self.args.disk else 0,
            l2_lanes=self.l2_lanes(),
            tiers=self.counters(),
            disks=self.disks(),
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


def beat(context: "zmq.Context[zmq.Socket[bytes]]", address: str, silent_after: float, pulse: Pulse, rank: int) -> None:
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    begin = time.monotonic()
    while not silent_after or time.monotonic() - begin < silent_after:
        socket.send(encode(Beat(pulse.tick, 0.0, rank)))
        time.sleep(0.1)


class Link:
    """The sockets to the server, and the beat."""

    def __init__(self, send_addr: str, recv_addr: str, rank: int, silent_after: float, pulse: Pulse) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.push, self.pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self.push.connect(send_addr)
        if recv_addr:
            self.pull.connect(recv_addr)
        threading.Thread(target=beat, args=(context, send_addr, silent_after, pulse, rank), daemon=True).start()


def lifeline() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--token-delay", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--fail-after", type=int, default=0)
    parser.add_argument("--part-after", type=int, default=0)
    parser.add_argument("--silent-after", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--refuse", default="")
    parser.add_argument("--refuse-late-s", type=float, default=0.0)
    parser.add_argument("--at-rank", type=int, default=0)
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--out-of-service", default="")
    parser.add_argument("--flush-message", default="")
    parser.add_argument("--pending-pages", type=int, default=0)
    parser.add_argument("--page-write-s", type=float, default=0.0)
    parser.add_argument("--die-at-stop", action="store_true")
    return parser.parse_args(arguments)


def main() -> int:
    order = decode_start(sys.stdin.buffer.readline())
    threading.Thread(target=lifeline, daemon=True).start()
    return run(order, parse(sys.argv[1:]))


def run(order: EngineStart, args: argparse.Namespace) -> int:
    """Be the rank that the order names. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    show_rank(order.rank)
    return lead(order, args) if order.rank == 0 else other(order, args)


def other(order: EngineStart, args: argparse.Namespace) -> int:
    """A rank but the first."""
    follower, pulse, chosen = Follower(order), Pulse(), order.rank == args.at_rank
    address = order.send_addr or follower.peer_addr
    link = Link(address, "", order.rank, args.silent_after if chosen else 0.0, pulse)
    time.sleep(args.load_s)
    if args.refuse and chosen:
        follower.leave()
        return refuse(link, order.rank, args)
    code = follow(follower, order, link.push, pulse, disk=args.disk)
    linger(link.push)
    return code


def refuse(link: Link, rank: int, args: argparse.Namespace) -> int:
    """Say that it can't start."""
    time.sleep(args.refuse_late_s)
    link.push.send(encode(Failed(args.refuse, rank=rank)))
    linger(link.push)
    return 1


def lead(order: EngineStart, args: argparse.Namespace) -> int:
    """The first rank."""
    pulse, chosen = Pulse(), args.at_rank == 0
    link = Link(order.send_addr, order.recv_addr, 0, args.silent_after if chosen else 0.0, pulse)
    leader = Leader(order)
    link.push.send(encode(Progress("weights", 0, 2)))
    time.sleep(args.load_s)
    if args.refuse and chosen:
        return refuse(link, 0, args)
    engine = FakeEngine(args, link, leader, pulse, order.config.parallel.cp_size)
    last: Failed | Stopped
    try:
        leader.turn()
        link.push.send(encode(Progress("weights", 2, 2)))
        link.push.send(encode(ready(args, order.config.cache.page_size)))
        engine.loop()
        leader.turn(STOP)
        last = Stopped(unwritten_pages=engine.pending)
    except PeerGone:
        last = lost(0)
    except RuntimeError as error:
        last = Failed(f"the engine failed: {error}")
    link.push.send(encode(last))
    linger(link.push)
    return 0 if isinstance(last, Stopped) else 1


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
