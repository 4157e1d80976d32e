"""`make bench-scale`: how far one Redis goes, and whether two workers get in each other's way."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.figures import percentile, summarise
from benchmarks.load import LoadDriver
from benchmarks.serving import own_redis, serving
from benchmarks.simulated_pool import PoolRun, fairness, run_pool
from benchmarks.workload import peers_workload, warm_up

RESULTS = Path(__file__).with_name("results")
SLOTS = 8
STEP_MS = 50.0
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Without a command: pool."""
    if context.invoked_subcommand is None:
        pool()


@app.command()
def pool(
    workers: Annotated[str, typer.Option(help="Sizes of the simulated pools.")] = "1,10,100",
    slots: Annotated[int, typer.Option(min=1, help="Jobs that a worker runs at a time.")] = SLOTS,
    step_ms: Annotated[float, typer.Option(min=0, help="Time of a worker's step, ms.")] = STEP_MS,
    seconds: Annotated[float, typer.Option(min=1, help="How long each pool is watched, s.")] = 15.0,
    full: Annotated[bool, typer.Option(help="Also 100 workers of 32 slots as fast as they can.")] = True,
) -> None:
    """Simulated workers on one real Redis: costs of claim and emit, fairness, where the server is full."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    sizes = [int(part) for part in workers.split(",")]
    with own_redis() as server:
        if server.pid is None:
            raise typer.BadParameter("the server's process is not ours to watch")
        runs = []
        for size in sizes:
            one = run_pool(server.url, server.pid, size, slots=slots, step_s=step_ms / 1e3, seconds=seconds)
            runs.append(asyncio.run(one))
        console.print(_table(runs, f"{slots} slots, {step_ms:g} ms a step"))
        if full:
            most = run_pool(server.url, server.pid, 100, slots=32, step_s=0.0, seconds=seconds)
            runs.append(asyncio.run(most))
            console.print(_table(runs[-1:], "as fast as one client process can"))
        console.print(_capacity(runs))
        ratios = {size: asyncio.run(fairness(server.url, size)) for size in sizes}
    for size, ratio in ratios.items():
        console.print(f"fairness, {size} workers: best served tenant {ratio:.2f} × the worst served")
    raw = [{**asdict(run), "tally": {"late_ms": percentile(run.tally.late_ms, 99)}} for run in runs]
    _write(console, "pool", {"runs": raw, "fairness": {str(k): v for k, v in ratios.items()}})


@app.command()
def workers(
    counts: Annotated[str, typer.Option(help="Numbers of worker processes.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, help="Medians are shown.")] = 3,
    split: Annotated[
        bool, typer.Option(help="Divide the cores among the workers; else each may use all.")
    ] = True,
    setting: Annotated[list[str] | None, typer.Option(help="For the workers: name=value.")] = None,
) -> None:
    """Real workers of the demo model on this machine's cores, all at once on the fixed workload."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    settings = dict(pair.split("=", 1) for pair in setting or [])
    speeds: dict[int, list[float]] = {int(part): [] for part in counts.split(",")}
    for number in range(rounds):
        for count in speeds:
            speed, others = asyncio.run(_throughput(count, split, settings))
            speeds[count].append(speed)
            console.print(
                f"  {number + 1}: {count} workers {speed:.1f} tok/s (others used {others:.2f} cores)"
            )
    medians = {count: statistics.median(found) for count, found in speeds.items()}
    first = next(iter(medians.values()))
    for count, speed in medians.items():
        console.print(f"{count} workers: {speed:.1f} tok/s, {speed / first:.2f} × the first")
    _write(console, "workers", {"split": split, "tokens_per_s": {str(k): v for k, v in speeds.items()}})


async def _throughput(count: int, split: bool, settings: Mapping[str, str]) -> tuple[float, float]:
    """Output tokens a second of `count` workers, and the cores that others used."""
    threads = max(1, (os.cpu_count() or 1) // count) if split else 0
    RESULTS.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        server = stack.enter_context(own_redis())
        running = []
        for number in range(count):
            own: dict[str, str | int] = {
                "prefix_cache": "false",
                "log_format": "json",
                "threads": threads,
                **settings,
            }
            log = RESULTS / f"worker-scale-{number}.log"
            worker = serving(server, "bench", {**own, "worker_id": f"scale-{number}"}, log)
            running.append(await stack.enter_async_context(worker))
        driver = await stack.enter_async_context(LoadDriver(server.url, "bench"))
        await running[0].during(driver.run([*warm_up()] * count))
        pids = {pid for worker in running for pid in worker.pids}
        before = machine.read_cpu(pids)
        jobs = await running[0].during(driver.run(peers_workload()))
        use = machine.cpu_use(before, machine.read_cpu(pids))
    return summarise(jobs).tokens_per_s, use.others if use else 0.0


def _table(runs: Sequence[PoolRun], title: str) -> Table:
    table = Table(title=title)
    for heading in (
        "workers",
        "tok/s",
        "pick, µs a call",
        "claim, µs a job",
        "emit, µs a token",
        "emit p50 / p99, ms",
        "late p99, ms",
        "client µs a token",
        "Redis busy",
        "MiB",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(*_cells(run))
    return table


def _cells(run: PoolRun) -> list[str]:
    tally, costs = run.tally, run.costs
    return [
        f"{run.workers}",
        f"{run.tokens_per_s:,.0f}",
        f"{costs['pick'].call_us:.0f}" if "pick" in costs else "–",
        *(f"{costs[name].item_us:.1f}" if name in costs else "–" for name in ("claim", "emit")),
        f"{percentile(tally.emit_ms, 50):.2f} / {percentile(tally.emit_ms, 99):.2f}",
        f"{percentile(tally.late_ms, 99):.1f}",
        f"{run.client_cpu_us:.1f}",
        f"{run.server_busy:.1%}",
        f"{run.redis_mib:.0f}",
    ]


def _capacity(runs: Sequence[PoolRun]) -> str:
    """Where the one core of a Redis is full, by what it was busy with at the highest rate."""
    busiest = max(runs, key=lambda run: run.tokens_per_s)
    full = busiest.tokens_per_s / busiest.server_busy
    seen = f"{busiest.server_busy:.0%} busy at {busiest.tokens_per_s:,.0f}"
    return f"one Redis is full at about {full:,.0f} tokens a second ({seen})"


def _write(console: Console, name: str, raw: Mapping[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"scale-{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine.describe(), **raw})))
    console.print(f"written: {path}")


if __name__ == "__main__":
    app()
