"""The plot of `benthic simulate`: where the input was found over the trace's time, and what was evicted meanwhile."""

from pathlib import Path

from benthic.common.errors import ConfigError
from benthic.simulation.report import TIERS, Report

_COLOURS = {"l1": "#1f6f8b", "l2": "#57b894", "l3": "#e0a458"}
_MINUTE_S = 60


def write_plot(path: Path, report: Report, title: str) -> None:
    """Write a PNG. Raises ConfigError where the file can't be written."""
    # only here: it takes longer to load than a short trace to replay. Figure, not pyplot: no window, no global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    shares, evictions = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title, fontsize=11)
    buckets = report.buckets
    minutes = [bucket.start_s / _MINUTE_S for bucket in buckets]
    width = report.bucket_s / _MINUTE_S
    below = [0.0] * len(buckets)
    for tier in TIERS:
        heights = [100 * bucket.found[tier] / bucket.pages if bucket.pages else 0.0 for bucket in buckets]
        label = f"{tier.upper()}: {report.share(tier):.2%} of all"
        shares.bar(minutes, heights, width, below, align="edge", color=_COLOURS[tier], label=label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
        rates = [bucket.evicted[tier] / width for bucket in buckets]
        evictions.step(minutes, rates, where="post", color=_COLOURS[tier], label=tier.upper())
    shares.set_ylabel("% of the input's pages found")
    shares.set_ylim(0, 100)
    evictions.set_ylabel("pages evicted a minute")
    evictions.set_xlabel("minutes into the trace")
    evictions.set_ylim(0, 1.3 * max(1.0, evictions.get_ylim()[1]))  # room for the legend
    for axes in (shares, evictions):
        axes.legend(loc="upper right", fontsize=9, ncols=len(TIERS))
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(
            f"--plot {path}: can't be written ({error.strerror}); name another file, or give --no-plot"
        ) from error
