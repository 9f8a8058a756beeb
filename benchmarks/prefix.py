"""First-token time of a prompt whose 2,048-token prefix is cached, against the same cold, through the real server.

`python -m benchmarks.prefix [--json] [--dtype float32]`; keys `cold_s`, `cached_s`, `ratio` (the bound is 10). Each
round sends a new prefix cold, then the same prefix with another ending; the usage must say that exactly the prefix's
whole pages were found.
"""

import random

import httpx

from benchmarks.common import Timing, arguments, report
from benchmarks.server import first_token as stream
from benchmarks.server import serve

PREFIX_TOKENS = 2048
ENDING_TOKENS = 16


def first_token(client: httpx.Client, model: str, ids: list[int]) -> tuple[float, int]:
    """(seconds to the first streamed token, cached tokens) of one request."""
    got = stream(client, model, ids, max_tokens=2)
    return got.seconds, got.details["cached_tokens"]


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "", repeats=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    dice = random.Random(1)
    cold: list[float] = []
    cached: list[float] = []

    def ids(count: int) -> list[int]:
        return [dice.randrange(100, 40_000) for _ in range(count)]

    with serve(args.model, "--dtype", args.dtype) as url, httpx.Client(base_url=url, timeout=600) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        first_token(client, model, ids(300))
        for _ in range(args.repeats):
            prefix = ids(PREFIX_TOKENS)
            seconds, found = first_token(client, model, prefix + ids(ENDING_TOKENS))
            assert found == 0, f"a new prompt found {found} cached tokens"
            cold.append(seconds)
            seconds, found = first_token(client, model, prefix + ids(ENDING_TOKENS))
            assert found == PREFIX_TOKENS, f"expected {PREFIX_TOKENS} cached tokens, found {found}"
            cached.append(seconds)
    ratio = Timing.of(cold).median_s / Timing.of(cached).median_s
    rows = [
        (f"cold, {PREFIX_TOKENS + ENDING_TOKENS} tokens", Timing.of(cold).describe()),
        (f"{PREFIX_TOKENS} of them cached", Timing.of(cached).describe()),
        ("cold / cached", f"{ratio:.1f}  (the bound is 10)"),
    ]
    figures = {"cold_s": Timing.of(cold).median_s, "cached_s": Timing.of(cached).median_s, "ratio": ratio}
    report("first-token time", rows, figures, as_json=args.json)


if __name__ == "__main__":
    main()
