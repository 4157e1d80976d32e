"""From runs to tables, a picture and a file of raw figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from benchmarks import machine
from benchmarks.figures import Summary, median_of
from benchmarks.peers.candidates import Lineup
from benchmarks.peers.measure import Comparison, Run, settings_line
from benchmarks.peers.work import Mode

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Medians:
    """Of one candidate in one mode, over its quiet rounds."""

    summary: Summary
    decode_tokens_per_s: float | None
    gflops: float
    read_gb_s: float
    start_s: float
    peak_mib: int


class Findings:
    """Medians by candidate and mode, and the best peer of each figure."""

    def __init__(self, runs: Sequence[Run], ours: set[str]) -> None:
        self.ours = ours
        self.names = list(dict.fromkeys(run.candidate for run in runs))
        self.modes = list(dict.fromkeys(run.mode for run in runs))
        quiet = [run for run in runs if run.quiet]
        self.by: dict[tuple[str, Mode], Medians] = {}
        for key in dict.fromkeys((run.candidate, run.mode) for run in quiet):
            self.by[key] = _medians([run for run in quiet if (run.candidate, run.mode) == key])

    def speed(self, name: str, mode: Mode) -> float | None:
        """Output tokens a second; of a single stream, after its first token."""
        found = self.by.get((name, mode))
        if found is None:
            return None
        return found.decode_tokens_per_s if mode.name == "single" else found.summary.tokens_per_s

    def latency(self, name: str, mode: Mode, field: str) -> float | None:
        found = self.by.get((name, mode))
        return None if found is None else getattr(found.summary, field)

    def with_ratio(self, name: str, value: Callable[[str], float | None], *, high_is_good: bool) -> str:
        """The figure, and how many times the best peer's it is."""
        own = value(name)
        if own is None or own != own:
            return NOTHING
        peers = [found for peer in self.names if peer not in self.ours and (found := value(peer))]
        best = (max if high_is_good else min)(peers, default=None)
        shown = f"{own:,.0f}" if own >= 100 else f"{own:.1f}"
        return shown if not best else f"{shown} ({own / best:.2f})"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is drawn."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> Table:
        table = Table(title=self.title)
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.headings) + " |", "|---" + "|---:" * (len(self.headings) - 1) + "|"]
        return "\n".join(
            [f"**{self.title}**", "", *lines, *("| " + " | ".join(row) + " |" for row in self.rows)]
        )


def grids(findings: Findings) -> list[Grid]:
    """One table for what is asked at once, one for each rate. In brackets: times the best peer's figure."""
    at_once = [mode for mode in findings.modes if mode.name != "online"]
    tables = [_at_once(findings, at_once)] if at_once else []
    return tables + [_online(findings, mode) for mode in findings.modes if mode.name == "online"]


def _at_once(findings: Findings, modes: Sequence[Mode]) -> Grid:
    headings = ["server"]
    for mode in modes:
        headings += [f"{mode.label}, tok/s", "TTFT p50, ms", "ITL p50 / p99, ms"]
    rows = []
    for name in findings.names:
        row = [name]
        for mode in modes:
            speed = findings.with_ratio(name, partial(findings.speed, mode=mode), high_is_good=True)
            row += [speed, *_latencies(findings, name, mode)]
        rows.append([*row, *_machine(findings, name)])
    return Grid("all at once, and alone", [*headings, "start, s", "peak MiB", "GFLOP/s, GB/s"], rows)


def _online(findings: Findings, mode: Mode) -> Grid:
    columns = (
        ("TTFT p50, ms", "ttft_p50_ms"),
        ("TTFT p99, ms", "ttft_p99_ms"),
        ("ITL p50, ms", "itl_p50_ms"),
        ("ITL p99, ms", "itl_p99_ms"),
    )
    rows = []
    for name in findings.names:
        values = [partial(findings.latency, mode=mode, field=field) for _, field in columns]
        cells = [findings.with_ratio(name, value, high_is_good=False) for value in values]
        if any(cell != NOTHING for cell in cells):
            rows.append([name, *cells, *_machine(findings, name)[-1:]])
    return Grid(mode.label, ["server", *(heading for heading, _ in columns), "GFLOP/s, GB/s"], rows)


def _latencies(findings: Findings, name: str, mode: Mode) -> list[str]:
    found = findings.by.get((name, mode))
    if found is None:
        return [NOTHING, NOTHING]
    s = found.summary
    return [f"{s.ttft_p50_ms:,.0f}", f"{s.itl_p50_ms:,.1f} / {s.itl_p99_ms:,.0f}"]


def _machine(findings: Findings, name: str) -> list[str]:
    found = [medians for (candidate, _), medians in findings.by.items() if candidate == name]
    if not found:
        return [NOTHING] * 3
    gflops = statistics.median(medians.gflops for medians in found)
    read_gb_s = statistics.median(medians.read_gb_s for medians in found)
    start_s = statistics.median(medians.start_s for medians in found)
    return [f"{start_s:.1f}", f"{max(m.peak_mib for m in found):,}", f"{gflops:.0f}, {read_gb_s:.0f}"]


def _medians(runs: Sequence[Run]) -> Medians:
    decode = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s is not None]
    return Medians(
        median_of([run.summary for run in runs]),
        statistics.median(decode) if decode else None,
        statistics.median(run.speed.gflops for run in runs),
        statistics.median(run.speed.read_gb_s for run in runs),
        statistics.median(run.start_s for run in runs),
        max(run.peak_mib for run in runs),
    )


def notes(comparison: Comparison, lineup: Lineup) -> list[str]:
    """What the reader of the tables has to know."""
    lines = [f"{name} did not take part: {reason}" for name, reason in lineup.missing.items()]
    lines += [f"{name} failed: {reason}" for name, reason in comparison.failed.items()]
    lines += [f"{name}: {settings_line(found)}" for name, found in comparison.settings.items()]
    noisy = [run for run in comparison.runs if not run.quiet]
    if noisy:
        limit = comparison.plan.quiet_cores
        lines.append(
            f"{len(noisy)} of {len(comparison.runs)} runs discarded: others used more than {limit} cores"
        )
    return lines


def write(comparison: Comparison, lineup: Lineup, findings: Findings, folder: Path) -> Path:
    """A PNG, and beside it the tables as Markdown and every run as JSON. Returns the PNG's path."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"peers-{time.strftime('%Y%m%d-%H%M%S')}.png"
    tables = "\n\n".join(grid.markdown() for grid in grids(findings))
    picture.with_suffix(".md").write_text(tables + "\n", encoding="utf-8")
    raw: Mapping[str, Any] = {
        "machine": machine.describe(),
        "versions": {candidate.name: candidate.version for candidate in lineup.candidates},
        "settings": comparison.settings,
        "notes": notes(comparison, lineup),
        "runs": [asdict(run) for run in comparison.runs],
    }
    picture.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(raw)))
    draw(picture, findings)
    return picture


def draw(path: Path, findings: Findings) -> None:
    """A panel for each mode: speeds as bars, and online the times between tokens, median and p99."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    modes = findings.modes
    figure, panels = pyplot.subplots(
        1, len(modes), figsize=(4.5 * len(modes), 4.2), layout="constrained", squeeze=False
    )
    for axes, mode in zip(panels[0], modes, strict=True):
        shown = [name for name in findings.names if (name, mode) in findings.by]
        colours = ["C0" if name in findings.ours else "C7" for name in shown]
        axes.set_title(mode.label)
        if mode.name == "online":
            _draw_gaps(axes, shown, [findings.by[name, mode].summary for name in shown], colours)
        else:
            bars = axes.barh(shown, [findings.speed(name, mode) or 0 for name in shown], color=colours)
            axes.bar_label(bars, fmt="%.0f")
            axes.set_xlabel("output tokens a second")
        axes.invert_yaxis()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_gaps(axes: Any, names: Sequence[str], summaries: Sequence[Summary], colours: Sequence[str]) -> None:
    for name, summary, colour in zip(names, summaries, colours, strict=True):
        axes.plot([summary.itl_p50_ms, summary.itl_p99_ms], [name, name], color=colour, linewidth=4)
        axes.plot(summary.itl_p50_ms, name, "o", color=colour)
    axes.set_xscale("log")
    axes.set_xlabel("time between tokens, median to p99, ms")
    axes.grid(alpha=0.3)
