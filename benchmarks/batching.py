"""Continuous batching against the older ways: dynamic, static and one request at a time, on the same work.

Each round starts every mode once, in turn, in a fresh worker process, so that a machine that gets slower
meanwhile slows all of them. The table shows medians over the rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.figures import Summary, Utilisation, median_of, summarise, utilisation
from benchmarks.load import JobTimes, LoadDriver
from benchmarks.picture import draw
from benchmarks.serving import own_redis, serving
from benchmarks.workload import Request, warm_up

MODES: Mapping[str, Mapping[str, str | int]] = {
    "continuous": {"batching": "continuous"},
    "dynamic": {"batching": "dynamic"},
    "static": {"batching": "static"},
    "one at a time": {"batching": "continuous", "max_num_seqs": 1},
}
QUIET_CORES = 0.1  # more than this used by others, and a figure is not to be trusted


@dataclass(frozen=True, slots=True)
class Run:
    """One mode in one round."""

    mode: str
    round: int
    summary: Summary
    utilisation: Utilisation
    cpu: machine.CpuUse | None
    jobs: Sequence[JobTimes]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `settings` go to every worker, below those of the mode."""

    scenario: str
    requests: Sequence[Request]
    rounds: int
    modes: Sequence[str]
    settings: Mapping[str, str | int]
    results: Path


def compare(plan: Plan, console: Console) -> list[Run]:
    """Runs the plan, prints the table and writes the picture and the raw figures."""
    plan.results.mkdir(parents=True, exist_ok=True)
    tokens = sum(request.output_tokens for request in plan.requests)
    console.print(
        f"{plan.scenario}: {len(plan.requests)} requests, {tokens} output tokens, {plan.rounds} rounds"
    )
    runs = []
    for number in range(plan.rounds):
        for mode in plan.modes:
            runs.append(asyncio.run(_measure(plan, mode, number)))
            console.print(_progress(runs[-1]))
    console.print(table_of(plan.scenario, runs))
    _warn_if_busy(runs, console)
    console.print(f"written: {_write(plan, runs)}")
    return runs


async def _measure(plan: Plan, mode: str, number: int) -> Run:
    settings = {**plan.settings, **MODES[mode]}
    log = plan.results / f"worker-{mode.replace(' ', '-')}.log"
    with own_redis() as server:
        async with (
            serving(server, "bench", settings, log) as worker,
            LoadDriver(server.url, "bench") as driver,
        ):
            await worker.during(driver.run(warm_up()))
            card, cpu = await worker.settled_card(), machine.read_cpu(worker.pids)
            jobs = await worker.during(driver.run(plan.requests))
            use = machine.cpu_use(cpu, machine.read_cpu(worker.pids))
            filled = utilisation(card, await worker.settled_card())
    return Run(mode, number, summarise(jobs), filled, use, jobs)


def table_of(scenario: str, runs: Sequence[Run]) -> Table:
    """Medians over the rounds, a row for each mode."""
    table = Table(title=f"{scenario}: medians of {1 + max(run.round for run in runs)} rounds")
    table.add_column("batching")
    for heading in ("out tok/s", "TTFT p50 / p99, ms", "ITL p50 / p99, ms", "end to end p50 / p99, s"):
        table.add_column(heading, justify="right")
    for heading in ("slots used", "KV used"):
        table.add_column(heading, justify="right")
    for mode in dict.fromkeys(run.mode for run in runs):
        table.add_row(mode, *_cells([run for run in runs if run.mode == mode]))
    return table


def _cells(runs: Sequence[Run]) -> list[str]:
    s = median_of([run.summary for run in runs])
    return [
        f"{s.tokens_per_s:.1f}",
        f"{s.ttft_p50_ms:,.0f} / {s.ttft_p99_ms:,.0f}",
        f"{s.itl_p50_ms:,.1f} / {s.itl_p99_ms:,.1f}",
        f"{s.e2e_p50_s:.2f} / {s.e2e_p99_s:.2f}",
        _percent([run.utilisation.slots for run in runs]),
        _percent([run.utilisation.kv for run in runs]),
    ]


def _percent(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{statistics.median(known):.0%}" if known else "–"


def _progress(run: Run) -> str:
    figures = run.summary
    return f"  round {run.round + 1}, {run.mode}: {figures.tokens_per_s:.1f} tok/s in {figures.wall_s:.1f} s"


def _warn_if_busy(runs: Sequence[Run], console: Console) -> None:
    others = [run.cpu.others for run in runs if run.cpu is not None]
    if others and max(others) > QUIET_CORES:
        console.print(
            f"[yellow]Up to {max(others):.1f} cores were busy with other work: don't trust this run."
        )


def _write(plan: Plan, runs: Sequence[Run]) -> Path:
    modes = list(dict.fromkeys(run.mode for run in runs))
    name = f"batching-{plan.scenario.replace(' ', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    by_mode = {mode: [run for run in runs if run.mode == mode] for mode in modes}
    picture = plan.results / f"{name}.png"
    draw(
        picture,
        f"{plan.scenario}: {len(plan.requests)} requests, {plan.rounds} rounds",
        {mode: median_of([run.summary for run in of_mode]) for mode, of_mode in by_mode.items()},
        {mode: [job for run in of_mode for job in run.jobs] for mode, of_mode in by_mode.items()},
    )
    raw = {
        "scenario": plan.scenario,
        "machine": machine.describe(),
        "settings": dict(plan.settings),
        "modes": {mode: dict(MODES[mode]) for mode in modes},
        "runs": [asdict(run) for run in runs],
    }
    picture.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(raw)))
    return picture
