"""One picture of a comparison: throughput, and how long readers wait for the first token and the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Summary, token_gaps_s
from benchmarks.load import JobTimes


def draw(
    path: Path, title: str, summaries: Mapping[str, Summary], jobs: Mapping[str, Sequence[JobTimes]]
) -> None:
    """Writes a PNG. `jobs`: of every round together, by mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, first, gaps) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    figure.suptitle(title)
    colours = [f"C{i}" for i in range(len(summaries))]  # as the curves beside them
    drawn = bars.bar(list(summaries), [s.tokens_per_s for s in summaries.values()], color=colours)
    bars.bar_label(drawn, fmt="%.0f")
    bars.set_ylabel("output tokens a second")
    bars.tick_params(axis="x", rotation=20)
    _shares(first, {mode: [job.first_token_s for job in runs] for mode, runs in jobs.items()})
    first.set_xlabel("time to first token, s")
    _shares(gaps, {mode: [g for job in runs for g in token_gaps_s(job)] for mode, runs in jobs.items()})
    gaps.set_xlabel("time between tokens, s")
    gaps.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _shares(axes: Any, values_by_mode: Mapping[str, Sequence[float]]) -> None:
    """Of each mode, the share of values up to x."""
    for mode, values in values_by_mode.items():
        if values:
            axes.ecdf(values, label=mode)
    axes.set_xscale("log")
    axes.set_ylabel("share")
    axes.grid(alpha=0.3)
