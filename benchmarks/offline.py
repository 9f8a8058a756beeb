"""Offline throughput through the whole engine against transformers on the same weights, dtype and threads.

`python -m benchmarks.offline [--json] [--dtype float32|bfloat16] [--model NAME | --random 1b|8b]`. Keys: `prefill`,
`decode_1`, `decode_8` (tokens/s), `peer_…` for transformers, `ratio_…`; on a GPU `decode_…_no_graphs` too. Runs
alternate, ours then the peer's; medians.
"""

import random
import statistics
from collections.abc import Callable

import torch

from benchmarks.common import arguments, report
from benchmarks.engine import BenchEngine, random_llama
from benchmarks.peer import Transformers, assert_same_tokens
from benthic.models.registry import Checkpoint, open_checkpoint
from benthic.weights.locate import locate

PREFILL_TOKENS = 2048
PROMPT_TOKENS = 128
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.25}  # gap of the two best logits below which rounding may choose


def prompts(dice: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    """Random prompts: nothing is shared between them."""
    return [[dice.randrange(vocab // 50, vocab - vocab // 10) for _ in range(length)] for _ in range(count)]


def alternate(ours: Callable[[], float], peer: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """(ours, the peer's, the ratio): medians over pairs."""
    pairs = [(ours(), peer()) for _ in range(repeats)]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "", repeats=3)
    parser.add_argument("--dtype", default="", choices=["", "float32", "bfloat16"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--random", default="", choices=["", "1b", "8b", "tiny"], help="random weights of that shape")
    parser.add_argument("--tokens", type=int, default=48, help="tokens a request in the decode runs")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype_name = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    dtype = getattr(torch, dtype_name)

    def checkpoint() -> Checkpoint:
        return random_llama(args.random, device) if args.random else open_checkpoint(locate(args.model))

    batches = (1, 8) if device.type == "cpu" else (1, 8, 64)
    options: dict[str, object] = {"dtype": dtype_name, "max_running": batches[-1]}
    if device.type == "cuda":
        options["l1_size"] = "24GiB"
    engine = BenchEngine(checkpoint(), **options)
    peer = Transformers(checkpoint(), device, dtype)
    vocab = engine.ready.vocab_size
    dice = random.Random(0)
    rows: list[tuple[str, str]] = [
        ("weights", f"{args.random or args.model}, {dtype_name}, {torch.get_num_threads()} threads")
    ]
    figures: dict[str, object] = {"dtype": dtype_name, "model": args.random or args.model}

    def add(name: str, label: str, values: tuple[float, float, float], bound: str) -> None:
        ours, theirs, ratio = values
        rows.append((label, f"{ours:,.1f} tokens/s; transformers {theirs:,.1f}; ratio {ratio:.2f}{bound}"))
        figures.update({name: ours, f"peer_{name}": theirs, f"ratio_{name}": ratio})

    total = 0
    for count in batches:  # warm up, and check the answers before any time is reported
        ids = prompts(dice, count, PROMPT_TOKENS, vocab)
        agreed = assert_same_tokens(engine.run(ids, 8).tokens, peer.run(ids, 8), TOLERANCE[dtype])
        rows.append((f"same tokens, batch {count}", f"{agreed} compared"))
        total += agreed
    assert total, "no token was far enough from a tie to compare"
    long = prompts(dice, 1, PREFILL_TOKENS, vocab)
    engine.run(long, 1), peer.run(long, 1)
    values = alternate(
        lambda: PREFILL_TOKENS / engine.run(long, 1).total_s,
        lambda: PREFILL_TOKENS / peer.run(long, 1).total_s,
        args.repeats,
    )
    add("prefill", f"prefill, {PREFILL_TOKENS} tokens", values, "  (bound 1)")
    short = {count: prompts(dice, count, PROMPT_TOKENS, vocab) for count in batches}
    for count, ids in short.items():
        values = alternate(
            lambda ids=ids: engine.run(ids, args.tokens).decode_per_s,  # type: ignore[misc]
            lambda ids=ids: peer.run(ids, args.tokens).decode_per_s,  # type: ignore[misc]
            args.repeats,
        )
        add(f"decode_{count}", f"decode, batch {count}", values, {1: "  (bound 1)", 8: "  (bound 1.5)"}.get(count, ""))
    engine.close()
    if device.type == "cuda":
        del peer
        plain = BenchEngine(checkpoint(), **options, graph_batch_sizes="none")
        for count, ids in short.items():
            plain.run(ids, 8)
            rate = statistics.median(plain.run(ids, args.tokens).decode_per_s for _ in range(args.repeats))
            rows.append((f"decode without graphs, batch {count}", f"{rate:,.1f} tokens/s"))
            figures[f"decode_{count}_no_graphs"] = rate
        plain.close()
        rows.append(("GPU", torch.cuda.get_device_name()))
    report("offline throughput", rows, figures, as_json=args.json)


if __name__ == "__main__":
    main()
