"""First-token time by tier through the engine alone, on weights drawn at random: what a GPU's tiers are worth.

`python -m benchmarks.tiers_engine [--random 1b|8b|tiny] [--tokens 16000] [--dir FOLDER] [--json]`; keys `cold_s`,
`l1_s`, `l2_s`, `l3_s`, and `…_ratio` (cold over hit). Answers must be the same wherever the prefix came from.
"""

import random
import shutil
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.common import Timing, arguments, report
from benchmarks.engine import BenchEngine, Ran, random_llama

KINDS = ("cold", "l1", "l2", "l3")


def first_tokens(engine: BenchEngine, tokens: int, repeats: int, *, exact: bool = True) -> dict[str, list[float]]:
    """Seconds to the first token of each kind, a list entry a round. Raises AssertionError for a wrong answer.

    Without `exact` a cold answer may differ from a hit's: where rounding decides between positions or experts.
    """
    dice = random.Random(0)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    engine.run([[dice.randrange(100, 400) for _ in range(tokens)]], 4)  # everything is compiled and faulted in
    for number in range(repeats):
        prompt = [dice.randrange(100, 400) for _ in range(tokens)]
        answers: list[Ran] = []
        for kind in KINDS:
            engine.settle()
            if kind == "l2":
                engine.flush("l1")
            elif kind == "l3":
                engine.flush("l1", "l2")
            ran = engine.run([prompt], 4, salt=f"round {number}")
            times[kind].append(ran.first_s)
            answers.append(ran)
            _check(kind, ran.cached, tokens)
        _check_answers([answer.tokens for answer in answers], exact, read=bool(sum(answers[3].cached)))
    return times


def _check_answers(tokens: list[list[list[int]]], exact: bool, read: bool) -> None:
    """Of cold, L1, L2 and L3 (`read`: not computed instead).

    Hits compute the same few rows, so their first tokens are equal to the bit; the cold one comes out of a longer
    product. What follows an L1 hit reads the last page that the cold run wrote; below, the page that the hit computed.
    """
    cold, l1, l2, l3 = tokens
    first = [request[0] for request in l1]
    for hit in (l2, l3) if read else (l2,):
        assert [request[0] for request in hit] == first, tokens
    if read:
        assert l3 == l2, tokens
    if exact:
        assert l2 == l1, tokens
        assert [request[0] for request in cold] == [request[0] for request in l3] == first, tokens


def _check(kind: str, cached: tuple[int, int, int], tokens: int) -> None:
    """The prefix came from where it should; from the disk, or from nowhere because computing is faster."""
    wanted = {"cold": (), "l1": (0,), "l2": (1,), "l3": (2,)}[kind]
    found = sum(cached[i] for i in wanted)
    assert sum(cached) == found, (kind, cached)
    assert not wanted or found >= 0.95 * tokens or (kind == "l3" and found == 0), (kind, cached)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "", repeats=3)
    parser.add_argument("--random", default="1b", choices=["1b", "8b", "tiny"], help="random weights of that shape")
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--dir", default=None, help="folder for the disk floor (default: a temporary one)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(args.dir or tempfile.mkdtemp(prefix="benthic-tiers-"))
    options: dict[str, object] = {"l2_size": "8GiB", "l3_dir": str(folder), "l3_size": "8GiB", "max_running": 16}
    if device.type == "cuda":
        options["l1_size"] = "16GiB"
    else:
        options |= {"l1_pages": 600, "l2_size": "256MiB", "l3_size": "1GiB"}
    engine = BenchEngine(random_llama(args.random, device), **options)
    try:
        times = first_tokens(engine, args.tokens, args.repeats)
        state = engine.engine.state()
    finally:
        engine.close()
        if args.dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    figures: dict[str, object] = {"model": args.random, "tokens": args.tokens}
    rows = [("model", f"random {args.random} on {device}, {args.tokens} tokens")]
    for kind in KINDS:
        timing = Timing.of(times[kind])
        figures[f"{kind}_s"] = timing.median_s
        ratio = statistics.median(c / h for c, h in zip(times["cold"], times[kind], strict=True))
        figures[f"{kind}_ratio"] = ratio
        rows.append((kind, f"{timing.describe()}  {ratio:.1f} times faster than cold"))
    reloads = state.tiers.reloads
    figures["reloads"] = reloads
    why = "" if reloads else "; not one reload: computing is faster than reading"
    rows.append(("disk", f"{state.disks[0].us_per_page_read} µs a page of {state.disks[0].slot_bytes} B{why}"))
    report("First token by tier", rows, figures, as_json=args.json)


if __name__ == "__main__":
    main()
