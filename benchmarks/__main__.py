"""`make bench`: the ways of batching compared on this machine. With `latency`: what Headrace itself adds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import gateway as gateway_figures
from benchmarks import latency as latency_figures
from benchmarks.batching import MODES, Plan, compare
from benchmarks.load import LoadError
from benchmarks.scenarios import SCENARIOS
from benchmarks.serving import ServingError
from benchmarks.workload import peers_workload
from headrace.embedded import EmbeddedRedisError

RESULTS = Path(__file__).with_name("results")
RATES_PER_S = (0.0, 2.5)  # all at once, and about half of what two cores serve
TOLD = (LoadError, ServingError, EmbeddedRedisError)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Option(envvar=["MODEL", "HEADRACE_MODEL"], help="Model; empty: the demo model.")]
Threads = Annotated[int, typer.Option(help="CPU threads of the worker; 0: all cores.")]


@app.callback()
def main() -> None:
    """Measures Headrace on this machine; without a command, compares the ways of batching."""


@app.command()
def batching(
    scenario: Annotated[
        str, typer.Option(envvar="SCENARIO", help=f"{', '.join(SCENARIOS)}, or all of them: all.")
    ] = "workload",
    rounds: Annotated[int, typer.Option(envvar="ROUNDS", min=1, help="The table shows the medians.")] = 3,
    mode: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODES)}; may be repeated.")] = None,
    scale: Annotated[
        float, typer.Option(envvar="SCALE", min=0.01, help="Share of a scenario's requests.")
    ] = 1.0,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Workload only: requests a second, 0 for all at once; may be repeated."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Slots of the batch.")] = 32,
    threads: Threads = 0,
    model: Model = "",
) -> None:
    """Continuous, dynamic and static batching, and one request at a time, on the same requests."""
    console = _console()
    names = list(SCENARIOS) if scenario == "all" else [scenario]
    modes = mode or list(MODES)
    for unknown in [*(n for n in names if n not in SCENARIOS), *(m for m in modes if m not in MODES)]:
        raise typer.BadParameter(
            f"{unknown!r}: scenarios are {', '.join(SCENARIOS)}; modes {', '.join(MODES)}"
        )
    settings = {**_settings(threads, model), "max_num_seqs": max_num_seqs}
    for name in names:
        if name == "workload":
            for each in rate or RATES_PER_S:
                title = f"workload at {each:g} a second" if each else "workload all at once"
                requests = peers_workload(each or None)
                compare(Plan(title, requests, rounds, modes, settings, RESULTS), console)
        else:
            compare(Plan(name, SCENARIOS[name](scale), rounds, modes, settings, RESULTS), console)


@app.command()
def latency(
    samples: Annotated[int, typer.Option(min=1, help="Jobs of each kind.")] = 50,
    idle_s: Annotated[float, typer.Option(min=1, help="How long the idle worker is watched, s.")] = 10.0,
    threads: Threads = 0,
    model: Model = "",
) -> None:
    """Queue to first token, joining a running batch, and an idle worker."""
    latency_figures.measure(_console(), RESULTS, _settings(threads, model), samples=samples, idle_s=idle_s)


@app.command()
def gateway(
    streams: Annotated[list[int] | None, typer.Option(help="Open at a time; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long each number is held, s.")] = 10.0,
) -> None:
    """What one gateway process carries: streams, tokens, latency, CPU and memory, and what peers pay."""
    gateway_figures.measure(_console(), RESULTS, streams=streams or [100, 250, 500, 1000], seconds=seconds)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def _settings(threads: int, model: str) -> dict[str, str | int]:
    # Without the prefix cache: the same prompts come again, and no other server in the comparison has seen
    # them.
    settings: dict[str, str | int] = {"prefix_cache": "false", "log_format": "json", "threads": threads}
    return {**settings, "model": model} if model else settings


def run() -> int:
    """The exit status. A measurement that came to nothing is told in one line for each reason."""
    try:
        app(with_command(sys.argv[1:]))
    except (*TOLD, ExceptionGroup) as failure:
        found = reasons(failure)
        if not all(isinstance(reason, TOLD) for reason in found):
            raise
        for reason in found:
            print(f"bench: {reason}", file=sys.stderr)
        return 1
    return 0


def with_command(arguments: Sequence[str]) -> list[str]:
    """`batching` is meant where no command is named."""
    if arguments and (arguments[0] == "--help" or not arguments[0].startswith("-")):
        return list(arguments)
    return ["batching", *arguments]


def reasons(failure: BaseException) -> list[BaseException]:
    """The errors within a group of groups."""
    if isinstance(failure, BaseExceptionGroup):
        return [reason for inner in failure.exceptions for reason in reasons(inner)]
    return [failure]


if __name__ == "__main__":
    sys.exit(run())
