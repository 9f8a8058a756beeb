"""From request records to figures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benthic.cli.bench_stats import RequestRecord, counts_table, latency_table, quantile, spread, summarize

FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(FLOATS, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_numpy_s(values: list[float], share: float) -> None:
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-6)


def test_a_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
    assert spread([]) is None


def test_rates_and_latencies_by_hand() -> None:
    summary = summarize(
        [
            RequestRecord(
                sent_s=11.0,
                ended_s=14.0,
                text_s=(13.0, 13.5, 14.0),
                prompt_tokens=60,
                output_tokens=5,
                cached_tokens=48,
            ),
            RequestRecord(sent_s=10.0, ended_s=12.0, text_s=(11.0, 12.0), prompt_tokens=40, output_tokens=2),
        ]
    )
    assert (summary.ok, summary.failed, summary.errors) == (2, 0, {})
    assert (summary.duration_s, summary.requests_per_s) == (4.0, 0.5)
    assert (summary.input_tokens, summary.input_tokens_per_s) == (100, 25.0)
    assert (summary.output_tokens, summary.output_tokens_per_s) == (7, 1.75)
    assert summary.cached_share == 0.48
    assert summary.ttft_s is not None
    assert summary.itl_s is not None
    assert summary.tpot_s is not None
    assert summary.e2e_s is not None
    assert (summary.ttft_s.mean, summary.ttft_s.p50) == (1.5, 1.5)
    assert summary.itl_s.mean == pytest.approx(2 / 3)
    assert summary.tpot_s.mean == pytest.approx((0.25 + 1.0) / 2)
    assert summary.e2e_s.p99 == pytest.approx(2.99)


def test_failures_are_counted_by_kind_and_spoil_no_figure() -> None:
    good = RequestRecord(sent_s=0.0, ended_s=1.0, text_s=(0.5,), prompt_tokens=8, output_tokens=1)
    late, full = (
        [RequestRecord(sent_s=0.0, ended_s=9.0, text_s=(8.0,), output_tokens=3, error=kind, detail=detail)]
        for kind, detail in (("ReadTimeout", ""), ("HTTP 429", "queue full: 1024"))
    )
    other = [RequestRecord(sent_s=0.0, ended_s=9.0, error="HTTP 429", detail="another")]
    summary = summarize([good, *late, *full, *other])
    assert (summary.ok, summary.failed) == (1, 3)
    assert list(summary.errors.items()) == [("HTTP 429", 2), ("ReadTimeout", 1)]
    assert summary.examples["HTTP 429"] == "queue full: 1024"
    assert summary.output_tokens == 1
    assert summary.e2e_s is not None
    assert summary.e2e_s.p99 == 1.0


def test_a_run_without_any_answer_still_has_tables() -> None:
    summary = summarize([RequestRecord(sent_s=1.0, ended_s=1.0, error="HTTP 503", detail="not [ready]")])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(counts_table(summary))
        console.print(latency_table(summary))
    assert "1; not [ready]" in capture.get()
    assert summary.requests_per_s == 0.0
    assert summarize([]).duration_s == 0.0
