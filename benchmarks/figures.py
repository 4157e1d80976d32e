"""From what readers saw to the figures of a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from benchmarks.load import JobTimes


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. `wall_s` is from the first submission to the last end."""

    output_tokens: int
    wall_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    e2e_p50_s: float
    e2e_p99_s: float


def summarise(jobs: Sequence[JobTimes]) -> Summary:
    tokens = sum(len(job.token_s) for job in jobs)
    wall_s = max(job.ended_s for job in jobs) - min(job.submitted_s for job in jobs)
    ttft = [1e3 * job.first_token_s for job in jobs if job.token_s]
    itl = [1e3 * gap for job in jobs for gap in token_gaps_s(job)]
    e2e = [job.ended_s - job.submitted_s for job in jobs]
    return Summary(
        tokens,
        wall_s,
        tokens / wall_s,
        *(percentile(values, percent) for values in (ttft, itl, e2e) for percent in (50, 99)),
    )


def token_gaps_s(job: JobTimes) -> list[float]:
    """The times between one token and the next."""
    return [later - earlier for earlier, later in pairwise(job.token_s)]


def median_of(summaries: Sequence[Summary]) -> Summary:
    """Figure by figure over the rounds."""
    columns = zip(*(asdict(summary).values() for summary in summaries), strict=True)
    return Summary(*(statistics.median(column) for column in columns))


@dataclass(frozen=True, slots=True)
class Utilisation:
    """How full batch and KV cache were over the steps of a run, 0 to 1; None when there were none."""

    steps: int
    slots: float | None
    kv: float | None


def utilisation(before: Mapping[str, float], after: Mapping[str, float]) -> Utilisation:
    """From the running sums on a worker's card, before and after."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def share(used: str, total: str) -> float | None:
        return grown(used) / grown(total) if grown(total) > 0 else None

    return Utilisation(
        round(grown("step")),
        share("slot_steps_used", "slot_steps_total"),
        share("kv_block_steps_used", "kv_block_steps_total"),
    )
