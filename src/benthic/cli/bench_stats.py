"""What a load run measured, from one record a request to the figures of the table. Pure: no clock, no network."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich.markup import escape
from rich.table import Table

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as its client saw it; times in seconds on one clock."""

    sent_s: float
    ended_s: float
    text_s: tuple[float, ...] = ()  # arrival of each chunk that brought text, rising
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None  # what kind of failure, e.g. `HTTP 429`; None: answered to its end
    detail: str = ""  # of the failure


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one quantity; seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """The figures of a run. Rates are over the time from the first request sent to the last one ended.

    Failures count in none but `failed`, `errors` and `examples`.
    """

    ok: int
    failed: int
    errors: Mapping[str, int]  # by kind, the most frequent first
    examples: Mapping[str, str]  # the first detail of each kind
    duration_s: float
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float  # of the input tokens
    ttft_s: Spread | None  # time to the first text
    itl_s: Spread | None  # between two chunks of one answer
    tpot_s: Spread | None  # a request's mean time for each output token after the first
    e2e_s: Spread | None

    def to_json(self) -> dict[str, Any]:
        """Plain data, every figure under the name above."""
        return asdict(self)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of `values` lie, linear between two. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and percentiles, or None where there is nothing to measure."""
    found = list(values)
    if not found:
        return None
    return Spread(sum(found) / len(found), *(quantile(found, share) for _, share in QUANTILES))


def summarize(records: Sequence[RequestRecord]) -> LoadSummary:
    """The figures of `records`, in any order."""
    good = [record for record in records if record.error is None]
    duration_s = max((r.ended_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    prompt, output, cached = (
        sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good), sum(r.cached_tokens for r in good)
    )  # fmt: skip
    return LoadSummary(
        ok=len(good),
        failed=len(records) - len(good),
        errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        examples={r.error: r.detail for r in reversed(records) if r.error is not None},
        duration_s=duration_s,
        requests_per_s=_rate(len(good), duration_s),
        input_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        input_tokens_per_s=_rate(prompt, duration_s),
        output_tokens_per_s=_rate(output, duration_s),
        cached_share=cached / prompt if prompt else 0.0,
        ttft_s=spread(r.text_s[0] - r.sent_s for r in good if r.text_s),
        itl_s=spread(b - a for r in good for a, b in pairwise(r.text_s)),
        tpot_s=spread(_seconds_per_token(r) for r in good if r.text_s and r.output_tokens > 1),
        e2e_s=spread(r.ended_s - r.sent_s for r in good),
    )


def _seconds_per_token(record: RequestRecord) -> float:
    return (record.text_s[-1] - record.text_s[0]) / (record.output_tokens - 1)


def _rate(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def counts_table(summary: LoadSummary) -> Table:
    """The totals and rates, one a row."""
    table = Table("", "figure", show_header=False)
    for name, value in (
        ("requests", f"{summary.ok} ok, {summary.failed} failed"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("requests/s", f"{summary.requests_per_s:.2f}"),
        ("input tokens", f"{summary.input_tokens}, {summary.input_tokens_per_s:.1f}/s"),
        ("output tokens", f"{summary.output_tokens}, {summary.output_tokens_per_s:.1f}/s"),
        ("cached input", f"{summary.cached_tokens} tokens, {summary.cached_share:.1%}"),
        *((kind, f"{count}; {summary.examples[kind]}".rstrip("; ")) for kind, count in summary.errors.items()),
    ):
        table.add_row(escape(name), escape(value))
    return table


def latency_table(summary: LoadSummary) -> Table:
    """The latencies in milliseconds."""
    table = Table("latency, ms", "mean", *(name for name, _ in QUANTILES))
    for name, found in (
        ("to first token", summary.ttft_s),
        ("between tokens", summary.itl_s),
        ("per output token", summary.tpot_s),
        ("end to end", summary.e2e_s),
    ):
        figures = [f"{1e3 * s:.1f}" for s in (found.mean, found.p50, found.p90, found.p99)] if found else ["-"] * 4
        table.add_row(name, *figures)
    return table
