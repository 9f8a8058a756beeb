"""First-token time of a long prompt by where its prefix lies, through the real server; and the scheduler's time a tick.

`python -m benchmarks.tiers [--tokens 4096] [--dir FOLDER] [--json]`; keys `cold_s`, `l1_s`, `l2_s`, `l3_s` (medians),
`l1_ratio`, `l2_ratio`, `l3_ratio` (cold over hit, same run), `tiers_us_per_tick` (median over decode and prefill ticks;
the bound is 50). Each round sends a new prompt cold, again (L1), again after L1 was flushed (L2), and again after the
server was stopped and started (L3). The usage must say that the prefix came from that tier, and the token must be the
same each time.
"""

import contextlib
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.common import Timing, arguments, report
from benchmarks.server import first_token as stream
from benchmarks.server import serve
from benthic.engine.llm import LLM

TIERS = ("l1", "l2", "l3")
SETTLE_S = 30.0


def first_token(client: httpx.Client, ids: list[int]) -> tuple[float, dict[str, int], str]:
    """(seconds to the first streamed token, cached tokens by tier, the text) of one request."""
    got = stream(client, client.get("/v1/models").json()["data"][0]["id"], ids)
    return got.seconds, got.details["cached_tokens_by_tier"], got.text


def wait_durable(client: httpx.Client) -> None:
    """Until nothing is on its way between the tiers any more."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        state = client.get("/cache").json()
        l3 = state["tiers"]["l3"]
        if not l3["spill_pending_pages"] and not state["in_flight"]["backup"]:
            return
        time.sleep(0.05)
    raise SystemExit(f"spills did not end within {SETTLE_S:g} s: {l3}")


@contextlib.contextmanager
def server(args: list[str]) -> Iterator[httpx.Client]:
    """A server with these flags, and a client of it that has sent one request."""
    with serve(*args) as url, httpx.Client(base_url=url, timeout=600) as client:
        first_token(client, [7] * 300)
        yield client


def rounds(flags: list[str], tokens: int, repeats: int) -> dict[str, list[float]]:
    """First-token seconds of each kind, a list entry a round."""
    dice = random.Random(1)
    times: dict[str, list[float]] = {name: [] for name in ("cold", *TIERS)}
    for number in range(repeats):
        ids = [dice.randrange(100, 40_000) for _ in range(tokens)]
        with server(flags) as client:
            seconds, cached, text = first_token(client, ids)
            assert not any(cached.values()), (number, cached)
            times["cold"].append(seconds)
            for tier in ("l1", "l2"):
                if tier == "l2":
                    wait_durable(client)
                    client.post("/cache/flush", json={"tiers": ["l1"]}).raise_for_status()
                times[tier].append(hit(client, ids, tier, text))
            wait_durable(client)
        with server(flags) as client:
            times["l3"].append(hit(client, ids, "l3", text))
    return times


def hit(client: httpx.Client, ids: list[int], tier: str, text: str) -> float:
    """First-token seconds of a request whose prefix lies in this tier alone. AssertionError where it does not."""
    seconds, cached, got = first_token(client, ids)
    assert cached[tier] >= len(ids) * 0.95, f"asked for a hit in {tier}: {cached}"
    assert got == text, f"{tier}: {got!r} instead of {text!r}"
    return seconds


def tick_times(model: str, folder: Path, dtype: str) -> list[float]:
    """Scheduler-thread microseconds that L2 and L3 took, a tick, while prompts are computed and answers decoded."""
    found: list[float] = []
    with LLM(model, dtype=dtype, l2_size="1GiB", l3_dir=str(folder), l3_size="2GiB", max_context=2048) as llm:
        engine, tick = llm.engine, llm.engine.tick

        def timed(messages):  # type: ignore[no-untyped-def]  # the engine's own signature
            before = engine.tiers_s
            replies = tick(messages)
            found.append((engine.tiers_s - before) * 1e6)
            return replies

        engine.tick = timed  # type: ignore[method-assign]  # looked at from outside, for this benchmark alone
        dice = random.Random(2)
        prompts = [[dice.randrange(100, 40_000) for _ in range(512)] for _ in range(8)]
        llm.generate(prompts, max_tokens=64, temperature=0.0, ignore_eos=True)
    return found


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "", repeats=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dir", default=None, help="folder for the disk floor (default: a temporary one)")
    args = parser.parse_args()
    folder = Path(args.dir or tempfile.mkdtemp(prefix="benthic-tiers-"))
    flags = [args.model, "--dtype", args.dtype, "--l2-size", "1GiB", "--l3-dir", str(folder / "floor"),
             "--l3-size", "3GiB"]  # fmt: skip
    try:
        times = rounds(flags, args.tokens, args.repeats)
        ticks = tick_times(args.model, folder / "ticks", args.dtype)
    finally:
        if args.dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    timings = {name: Timing.of(seconds) for name, seconds in times.items()}
    figures: dict[str, object] = {f"{name}_s": timing.median_s for name, timing in timings.items()}
    rows = [("cold", timings["cold"].describe())]
    for tier in TIERS:
        ratio = statistics.median(c / h for c, h in zip(times["cold"], times[tier], strict=True))
        figures[f"{tier}_ratio"] = ratio
        rows.append((f"prefix in {tier.upper()}", f"{timings[tier].describe()}  {ratio:.1f} times faster"))
    figures["tiers_us_per_tick"] = statistics.median(ticks)
    rows.append(("L2 and L3, scheduler thread", f"{statistics.median(ticks):.0f} µs a tick (median of {len(ticks)})"))
    report(f"First token of {args.tokens} tokens", rows, figures, as_json=args.json)


if __name__ == "__main__":
    main()
