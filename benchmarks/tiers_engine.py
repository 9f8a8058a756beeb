"""First-token time by tier through the engine alone, on weights drawn at random: what a GPU's tiers are worth.

`python -m benchmarks.tiers_engine [--random 1b|8b|tiny] [--tokens 16000] [--dir FOLDER] [--json]`; keys `cold_s`,
`l1_s`, `l2_s`, `l3_s`, and `…_ratio` (cold over hit). Answers must be the same wherever the prefix came from.
Of the rounds with the prefix on disk, `l3_read_s` lists those that read it, `l3_computed_s` those that computed it
instead, `l3_read_tokens` what each got from the disk, and `l3_over_cold` each round's time over its cold one.
"""

import random
import shutil
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.common import Timing, arguments, report
from benchmarks.engine import BenchEngine, Ran, random_llama

KINDS = ("cold", "l1", "l2", "l3")
WHOLE = 0.95  # of a prompt's tokens count as all of them: its last page is computed anew


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """What `first_tokens` has seen; list entries are rounds."""

    tokens: int  # of a prompt
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    from_disk: list[int] = field(default_factory=list)  # tokens that the run with the prefix on disk got from there

    @property
    def was_read(self) -> list[bool]:
        """Whether the prefix came from the disk, and was not computed."""
        return [found >= WHOLE * self.tokens for found in self.from_disk]

    def choice(self) -> dict[str, object]:
        """How the engine chose between reading and computing, for the JSON line."""
        l3 = self.seconds["l3"]
        rounds = list(zip(l3, self.was_read, strict=True))
        return {
            "l3_read_s": [seconds for seconds, was_read in rounds if was_read],
            "l3_computed_s": [seconds for seconds, was_read in rounds if not was_read],
            "l3_read_tokens": self.from_disk,
            "l3_over_cold": [hit / cold for hit, cold in zip(l3, self.seconds["cold"], strict=True)],
        }

    def describe_choice(self) -> str:
        """For the table."""
        l3 = zip(self.seconds["l3"], self.seconds["cold"], self.from_disk, self.was_read, strict=True)
        return "; ".join(
            f"{hit * 1e3:.0f} ms, {hit / cold:.2f} of cold, "
            + ("read" if was_read else f"computed after a sample of {found} tokens" if found else "computed")
            for hit, cold, found, was_read in l3
        )


def first_tokens(engine: BenchEngine, tokens: int, repeats: int, *, exact: bool = True) -> FirstTokens:
    """Seconds to the first token of each kind. Raises AssertionError for a wrong answer.

    Without `exact` a cold answer may differ from a hit's: where rounding decides between positions or experts. The
    first prompt, which nothing reads back from the disk, leaves as many pages there as a round's.
    """
    dice = random.Random(0)
    seen = FirstTokens(tokens)
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
            seen.seconds[kind].append(ran.first_s)
            answers.append(ran)
            _check(kind, ran.cached, tokens, _sample_tokens(engine))
        seen.from_disk.append(answers[3].cached[2])
        _check_answers([answer.tokens for answer in answers], exact, read=seen.was_read[-1])
    return seen


def _sample_tokens(engine: BenchEngine) -> int:
    """What is read at most of a prefix that is then computed: by that the disk is measured."""
    config = engine.engine.scheduler.core.config
    return engine.ready.page_size * config.reload_sample_pages * config.num_owners


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


def _check(kind: str, cached: tuple[int, int, int], tokens: int, sample: int) -> None:
    """The prefix came from where it should; from the disk, or at most a sample of it because computing is faster."""
    wanted = {"cold": (), "l1": (0,), "l2": (1,), "l3": (2,)}[kind]
    found = sum(cached[i] for i in wanted)
    assert sum(cached) == found, (kind, cached)
    assert not wanted or found >= WHOLE * tokens or (kind == "l3" and found <= sample), (kind, cached)


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
        seen = first_tokens(engine, args.tokens, args.repeats)
        state = engine.engine.state()
    finally:
        engine.close()
        if args.dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    figures: dict[str, object] = {"model": args.random, "tokens": args.tokens}
    rows = [("model", f"random {args.random} on {device}, {args.tokens} tokens")]
    for kind in KINDS:
        timing = Timing.of(seen.seconds[kind])
        figures[f"{kind}_s"] = timing.median_s
        ratio = statistics.median(c / h for c, h in zip(seen.seconds["cold"], seen.seconds[kind], strict=True))
        figures[f"{kind}_ratio"] = ratio
        rows.append((kind, f"{timing.describe()}  {ratio:.1f} times faster than cold"))
    figures |= {"reloads": state.tiers.reloads, **seen.choice()}
    rate, slot_bytes = state.disks[0].us_per_page_read, state.disks[0].slot_bytes
    rows.append(("disk", f"{rate or '?'} µs a page of {slot_bytes} B; {seen.describe_choice()}"))
    report("First token by tier", rows, figures, as_json=args.json)


if __name__ == "__main__":
    main()
