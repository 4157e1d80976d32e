"""`make bench-peers`: Headrace through Redis and its gateway beside other servers, same model, same work."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.load import LoadError
from benchmarks.peers.candidates import OURS, SHORT, Lineup, line_up, peers_named
from benchmarks.peers.install import PeerFolder
from benchmarks.peers.measure import Comparison, Plan
from benchmarks.peers.report import Findings, grids, notes, write
from headrace.config import default_cache_dir

RESULTS = Path(__file__).parents[1] / "results"
MODES = ("offline", "single", "online")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    peers: Annotated[
        str, typer.Option(help=f"Of {', '.join(SHORT)}; also forms like llama:q8_0; or all.")
    ] = "openvino,llama",
    ours: Annotated[str, typer.Option(help=f"Of {', '.join(OURS)}; empty: none.")] = "fp32,int8",
    setting: Annotated[
        list[str] | None, typer.Option(help="For our worker: name=value; may be repeated.")
    ] = None,
    modes: Annotated[str, typer.Option(help=f"Of {', '.join(MODES)}.")] = ",".join(MODES),
    rounds: Annotated[int, typer.Option(min=1, help="Of offline and single; tables show medians.")] = 3,
    online_rounds: Annotated[int, typer.Option(min=1, help="Of each arrival rate.")] = 1,
    rates: Annotated[
        str, typer.Option(help="Requests a second; empty: half and nine tenths of the best peer's capacity.")
    ] = "",
    threads: Annotated[int, typer.Option(min=0, help="Of every server; 0: all cores.")] = 0,
    quiet_cores: Annotated[
        float, typer.Option(min=0, help="A run in which other processes use more is discarded.")
    ] = 0.1,
    again: Annotated[int, typer.Option(min=0, help="Times that such a run is done again.")] = 1,
    install_only: Annotated[
        bool, typer.Option("--install-only", help="Fetch and build, measure nothing.")
    ] = False,
) -> None:
    """Measures Headrace and its peers in turns. Peers are installed on first use, under the cache folder."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    threads = threads or os.cpu_count() or 1
    folder = PeerFolder(Path(os.environ.get("HEADRACE_CACHE_DIR") or default_cache_dir()) / "peers")
    lineup = line_up(_variants(ours), _peers(peers), folder, threads, _settings(setting or []))
    for name, reason in lineup.missing.items():
        console.print(f"[yellow]{name} cannot take part: {reason}")
    if install_only or not lineup.candidates:
        raise typer.Exit(0 if lineup.candidates else 1)
    plan = Plan(
        candidates=lineup.candidates,
        modes=_named(modes, MODES, "--modes"),
        rounds=rounds,
        online_rounds=online_rounds,
        rates_per_s=_rates(rates),
        threads=threads,
        quiet_cores=quiet_cores,
        again=again,
        logs=folder.logs,
    )
    raise typer.Exit(0 if _compare(plan, lineup, console) else 1)


def _compare(plan: Plan, lineup: Lineup, console: Console) -> bool:
    """Measures, prints and writes. Returns whether any figure is to be trusted."""
    comparison = Comparison(plan, console)
    try:
        comparison.run()
    except LoadError as problem:
        console.print(f"[red]{problem}")
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: the tables show what was measured so far")
    findings = Findings(comparison.runs, {c.name for c in lineup.candidates if c.is_ours})
    for grid in grids(findings):
        console.print(grid.rich())
    console.print("In brackets: how many times the best peer's figure.")
    for note in notes(comparison, lineup):
        console.print(f"[yellow]{note}")
    if comparison.runs:
        console.print(f"written: {write(comparison, lineup, findings, RESULTS)}, .md and .json")
    return bool(findings.by)


def _variants(text: str) -> list[str]:
    return _named(text, tuple(OURS), "--ours")


def _peers(text: str) -> list[str]:
    try:
        return peers_named(text)
    except ValueError as problem:
        raise typer.BadParameter(f"--peers: {problem}") from None


def _named(text: str, known: tuple[str, ...], flag: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{flag}: {name!r} is not one of {', '.join(known)}")
    return names


def _rates(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"--rates: {text!r}: numbers, separated by commas") from None
    if any(rate <= 0 for rate in found):
        raise typer.BadParameter("--rates: more than nothing")
    return found


def _settings(pairs: list[str]) -> Mapping[str, str | int]:
    for pair in pairs:
        if "=" not in pair:
            raise typer.BadParameter(f"--setting: {pair!r}: name=value")
    return dict(pair.split("=", 1) for pair in pairs)


if __name__ == "__main__":
    app()
