"""What one gateway process carries: streams, tokens, added latency, CPU a token, memory a stream.

A process plays the workers through the real scripts and another is all the readers (`gateway_sides.py`).
Beside it: a bare subscriber to the same messages, and llama.cpp's server delivering its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.gateway_peer import Delivery, deliver_with_llama
from benchmarks.gateway_sides import POOL, TOKENS_PER_S, WARM_UP_S, Side, make_pool
from benchmarks.serving import own_redis

LIMIT_MS = 20.0  # of the p99 of added latency
IDLE_S = 5.0
BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "stream": True,
    "max_tokens": 10**6,
    "on_disconnect": "continue",  # the bare subscriber hears what the same jobs say then
}


@dataclass(frozen=True, slots=True)
class Level:
    """One number of streams, each at `TOKENS_PER_S`. Latencies are from before the worker's `emit` to the
    reader's socket, whatever is in between: the script, the channel, the gateway.
    """

    streams: int
    tokens_per_s: float  # delivered
    latency_p50_ms: float
    latency_p99_ms: float
    bare_p99_ms: float  # the same for a bare subscriber to the live channels
    cpu: float  # of the gateway, in cores
    cpu_us_per_token: float
    bare_cpu_us_per_token: float
    reader_cpu: float  # of the process that reads all streams, in cores: near 1 it is what is measured
    publisher_late_p99_ms: float  # of who plays the workers: how far behind its time a step ended
    others_cpu: float | None  # what else ran on the machine, both sides and Redis included, in cores


@dataclass(frozen=True, slots=True)
class Idle:
    """Streams of jobs that wait."""

    streams: int
    kib_per_stream: float
    cpu: float  # of the gateway, in cores


@dataclass(frozen=True, slots=True)
class Carried:
    levels: list[Level]
    idle: Idle
    llama: Delivery | str  # or why there is none

    @property
    def sustained(self) -> Level | None:
        """The most streams whose tokens came at the rate they were made, in time."""
        good = [
            level
            for level in self.levels
            if level.latency_p99_ms <= LIMIT_MS and level.tokens_per_s > 0.97 * level.streams * TOKENS_PER_S
        ]
        return max(good, key=lambda level: level.streams, default=None)


def measure(console: Console, results: Path, *, streams: list[int], seconds: float) -> Carried:
    """Runs every level, prints and writes them. Raises LoadError when a side fails."""
    results.mkdir(parents=True, exist_ok=True)
    with own_redis() as server:
        uvloop.run(make_pool(server.url))
        with _gateway(server.url) as (url, pid):
            idle = _idle(url, pid, max(streams))
    levels = []
    for count in streams:
        with own_redis() as server:
            uvloop.run(make_pool(server.url))
            with _gateway(server.url) as (url, pid):
                levels.append(_level(server.url, url, pid, count, seconds))
    carried = Carried(levels, idle, deliver_with_llama(results, seconds))
    show(console, carried)
    path = results / f"gateway-{time.strftime('%Y%m%d-%H%M%S')}.json"
    raw = {"machine": machine.describe(), **asdict(carried)}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(raw)))
    return carried


@contextmanager
def _gateway(redis_url: str) -> Iterator[tuple[str, int]]:
    """A gateway process: its URL and its pid."""
    command = [sys.executable, "-m", "gateway", "--redis-url", redis_url, "--pool", POOL, "--port", "0"]
    process = subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True)
    try:
        lines = process.stderr or ()
        told = next(line for line in lines if '"listening"' in line)
        yield json.loads(told)["url"], process.pid
    finally:
        process.terminate()
        process.wait(20)


def _level(redis_url: str, url: str, pid: int, streams: int, seconds: float) -> Level:
    with ExitStack() as sides:
        publisher = sides.enter_context(Side("publish", redis_url, streams))
        with Side("read", url, streams, seconds, BODY) as reader:
            reader.line()
            before = machine.read_cpu({pid})
            cpu_s = machine.process_cpu_s(pid)
            read = reader.found()
            cpu_s = machine.process_cpu_s(pid) - cpu_s
            use = machine.cpu_use(before, machine.read_cpu({pid}))
        time.sleep(WARM_UP_S)  # the gateway gives its streams up
        bare = sides.enter_context(Side("subscribe", redis_url, streams, seconds)).found()
        published = publisher.stop()
    return level_of(streams, read, cpu_s, bare, published, use.others if use else None)


def level_of(
    streams: int,
    read: dict[str, float],
    cpu_s: float,
    bare: dict[str, float],
    published: dict[str, float],
    others: float | None,
) -> Level:
    return Level(
        streams,
        read["tokens"] / read["wall_s"],
        read["p50_ms"],
        read["p99_ms"],
        bare["p99_ms"],
        cpu_s / read["wall_s"],
        cpu_s / max(read["tokens"], 1) * 1e6,
        bare["cpu_us_per_token"],
        read["reader_cpu"],
        published["late_p99_ms"],
        others,
    )


def _idle(url: str, pid: int, count: int) -> Idle:
    with Side("hold", url, 20, body=BODY) as few:  # everything it needs to have once
        few.line()
    time.sleep(WARM_UP_S)
    before_kib = _rss_kib(pid)
    with Side("hold", url, count, body=BODY) as many:
        many.line()
        time.sleep(WARM_UP_S)
        after_kib, cpu_s = _rss_kib(pid), machine.process_cpu_s(pid)
        time.sleep(IDLE_S)
        cpu_s = machine.process_cpu_s(pid) - cpu_s
    return Idle(count, (after_kib - before_kib) / count, cpu_s / IDLE_S)


def _rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


def show(console: Console, carried: Carried) -> None:
    table = Table(
        "streams", "tokens/s", "p50 ms", "p99 ms", "bare p99", "cores", "µs/token", "bare µs",
        "reader cores", "late p99", "others", box=None,
    )  # fmt: skip
    for level in carried.levels:
        row = asdict(level)
        table.add_row(str(row.pop("streams")), *("-" if x is None else f"{x:.2f}" for x in row.values()))
    console.print(table)
    best = carried.sustained
    told = f"{best.streams} streams × {TOKENS_PER_S:.0f} tokens/s" if best else "none of these levels"
    console.print(f"sustained with p99 ≤ {LIMIT_MS:.0f} ms added: {told}")
    idle = carried.idle
    console.print(
        f"{idle.streams} idle streams: {idle.kib_per_stream:.1f} KiB each, {idle.cpu:.3f} cores in all"
    )
    console.print(f"llama.cpp's server: {carried.llama}")
