"""What one gateway process carries: streams, tokens, added latency, CPU a token, memory a stream.

A publisher process plays the worker through the real scripts; every token's text is the time at which it was
published, so a reader can tell how long the token was under way.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.figures import percentile
from benchmarks.serving import own_redis
from headrace.connect import connect
from headrace.keys import POOLS, Keys
from headrace.messages import Delta, End, Usage
from headrace.script_types import Claimed, EmitItem, Entry, Final
from headrace.scripts import Scripts

POOL = "bench"
TOKENS_PER_S = 20.0
LIMIT_MS = 20.0  # of the p99 of added latency
SAMPLED = 10  # of so many streams one is timed, lest the reader be what is measured
WARM_UP_S = 2.0
_STAMP = re.compile(rb'"content":"(\d+) "')
_PUBLISHED = re.compile(rb'"text":"(\d+) "')
_TOKEN = b'"content":"'


@dataclass(frozen=True, slots=True)
class Level:
    """One number of streams, each at `TOKENS_PER_S`. Latencies are from publishing to the reader's socket."""

    streams: int
    tokens_per_s: float  # delivered
    latency_p50_ms: float
    latency_p99_ms: float
    bare_p99_ms: float  # the same for a bare subscriber to the live channels
    cpu: float  # of the gateway, in cores
    cpu_us_per_token: float
    bare_cpu_us_per_token: float
    others_cpu: float | None  # what else ran on the machine, in cores


@dataclass(frozen=True, slots=True)
class Carried:
    levels: list[Level]
    kib_per_idle_stream: float

    @property
    def sustained(self) -> Level | None:
        """The most streams whose tokens came at the rate they were made, in time."""
        good = [
            level
            for level in self.levels
            if level.latency_p99_ms - level.bare_p99_ms <= LIMIT_MS
            and level.tokens_per_s > 0.97 * level.streams * TOKENS_PER_S
        ]
        return max(good, key=lambda level: level.streams, default=None)


def measure(console: Console, results: Path, *, streams: list[int], seconds: float) -> Carried:
    """Runs every level, prints and writes them."""
    results.mkdir(parents=True, exist_ok=True)
    with own_redis() as server:
        with _gateway(server.url) as (url, pid):
            idle_kib = asyncio.run(_idle_memory(url, pid, max(streams)))
        with _gateway(server.url) as (url, pid):
            levels = [asyncio.run(_level(server.url, url, pid, count, seconds)) for count in streams]
    carried = Carried(levels, idle_kib)
    _print(console, carried)
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


async def _level(redis_url: str, url: str, pid: int, streams: int, seconds: float) -> Level:
    helpers = [
        _helper("publish", redis_url, streams, seconds),
        _helper("subscribe", redis_url, streams, seconds),
    ]
    readers = await _readers(url, streams)
    try:
        await asyncio.sleep(WARM_UP_S)
        before = _Moment.now(pid, helpers[1].pid, readers)
        await asyncio.sleep(seconds)
        after = _Moment.now(pid, helpers[1].pid, readers)
        latencies = sorted(x for reader in readers for x in reader.latencies_ms)
        bare = json.loads((await asyncio.to_thread(helpers[1].communicate, timeout=60))[0])
    finally:
        for reader in readers:
            reader.close()
        for helper in helpers:
            helper.kill()
            helper.wait()
    return _compare(streams, before, after, latencies, bare["p99_ms"])


@dataclass(frozen=True, slots=True)
class _Moment:
    at_s: float
    gateway_cpu_s: float
    bare_cpu_s: float
    tokens: int
    machine: machine.CpuReading | None

    @classmethod
    def now(cls, gateway_pid: int, bare_pid: int, readers: list[_Reader]) -> _Moment:
        return cls(
            time.perf_counter(),
            machine.process_cpu_s(gateway_pid),
            machine.process_cpu_s(bare_pid),
            sum(reader.tokens for reader in readers),
            machine.read_cpu({gateway_pid}),
        )


def _compare(
    streams: int, before: _Moment, after: _Moment, latencies_ms: list[float], bare_p99_ms: float
) -> Level:
    wall_s, tokens = after.at_s - before.at_s, max(after.tokens - before.tokens, 1)
    cpu_s, bare_s = after.gateway_cpu_s - before.gateway_cpu_s, after.bare_cpu_s - before.bare_cpu_s
    use = machine.cpu_use(before.machine, after.machine)
    return Level(
        streams,
        tokens / wall_s,
        percentile(latencies_ms, 50),
        percentile(latencies_ms, 99),
        bare_p99_ms,
        cpu_s / wall_s,
        cpu_s / tokens * 1e6,
        bare_s / tokens * 1e6,
        use.others if use else None,
    )


class _Reader(asyncio.Protocol):
    """One client's stream. Only a sampled one looks at what it gets."""

    def __init__(self, host: str, sampled: bool) -> None:
        self._host = host
        self._sampled = sampled
        self._transport: asyncio.Transport | None = None
        self.tokens = 0
        self.latencies_ms: list[float] = []
        self.open = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        body = json.dumps(
            {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 10**6}
        )
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        transport.write((head + body).encode())

    def data_received(self, data: bytes) -> None:
        self.open.set()
        self.tokens += data.count(_TOKEN)
        if self._sampled:
            now_ns = time.monotonic_ns()
            self.latencies_ms += [(now_ns - int(stamp)) / 1e6 for stamp in _STAMP.findall(data)]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def _readers(url: str, count: int) -> list[_Reader]:
    host, port = url.removeprefix("http://").split(":")
    readers = [_Reader(host, number % SAMPLED == 0) for number in range(count)]
    loop = asyncio.get_running_loop()
    for reader in readers:
        await loop.create_connection(lambda reader=reader: reader, host, int(port))  # type: ignore[misc]
    async with asyncio.timeout(120):
        for reader in readers:
            await reader.open.wait()
    return readers


async def _idle_memory(url: str, pid: int, count: int) -> float:
    """KiB of a fresh gateway for each stream that says nothing yet."""
    for reader in await _readers(url, 20):  # everything it needs to have once
        reader.close()
    before_kib = _rss_kib(pid)
    readers = await _readers(url, count)
    try:
        await asyncio.sleep(WARM_UP_S)
        return (_rss_kib(pid) - before_kib) / count
    finally:
        for reader in readers:
            reader.close()


def _rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


# --- the other side, each in a process of its own


def _helper(role: str, redis_url: str, streams: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gateway", role, redis_url, str(streams), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@dataclass(slots=True)
class _Speaking:
    entry: Entry
    claimed: Claimed
    seq: int = 0

    def say(self) -> EmitItem:
        self.seq += 1
        delta = Delta(seq=self.seq, text=f"{time.monotonic_ns()} ", ids=[self.seq])
        return self._item([delta], None)

    def end(self) -> EmitItem:
        usage = Usage(prompt_tokens=1, completion_tokens=self.seq, total_tokens=self.seq + 1)
        return self._item([End(seq=self.seq + 1, status="cancelled", usage=usage)], Final("cancelled", usage))

    def _item(self, events: list[Any], final: Final | None) -> EmitItem:
        entry = self.entry
        return EmitItem(
            self.claimed.job_id, entry.job_class, entry.entry_id, self.claimed.epoch, events, final, 1
        )


@dataclass(slots=True)
class _Publisher:
    """Takes the jobs and says one token of each, `TOKENS_PER_S` times a second, 64 jobs a call."""

    redis_url: str
    speaking: list[_Speaking] = field(default_factory=list)

    async def run(self, streams: int, seconds: float) -> None:
        redis = connect(self.redis_url)
        scripts, keys = Scripts(redis, Keys(POOL)), Keys(POOL)
        await redis.hset(keys.worker("bench"), mapping={"model": POOL})  # type: ignore[misc]
        await redis.zadd(keys.workers, {"bench": 4e12})
        await redis.sadd(POOLS, POOL)  # type: ignore[misc]
        while len(self.speaking) < streams:
            await self._take(scripts)
        loop = asyncio.get_running_loop()
        next_s, end_s = loop.time(), loop.time() + seconds + 30
        while loop.time() < end_s:
            for at in range(0, len(self.speaking), 64):
                await scripts.emit([job.say() for job in self.speaking[at : at + 64]])
            next_s += 1 / TOKENS_PER_S
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    async def _take(self, scripts: Scripts) -> None:
        picked = await scripts.pick("bench", 64, budget_tokens=10**9, lease_ms=3_600_000)
        items = [(e.job_class, e.entry_id, e.fields[b"id"].decode(), None) for e in picked.entries]
        claims = await scripts.claim("bench", items, lease_ms=3_600_000, max_attempts=3)
        pairs = zip(picked.entries, claims, strict=True)
        self.speaking += [_Speaking(entry, claim) for entry, claim in pairs if claim.outcome == "run"]
        await asyncio.sleep(0.01)


async def _subscribe(redis_url: str, seconds: float) -> float:
    """A bare subscriber to all live channels; the p99 of what it sees, ms."""
    redis = connect(redis_url, blocking=True)
    latencies_ms: list[float] = []
    number, end_s = 0, float("inf")
    async with redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.psubscribe(Keys(POOL).live("*"))
        async for message in pubsub.listen():
            end_s = min(end_s, time.monotonic() + WARM_UP_S + seconds)
            number += 1
            if number % SAMPLED == 0 and (match := _PUBLISHED.search(message["data"])):
                latencies_ms.append((time.monotonic_ns() - int(match[1])) / 1e6)
            if time.monotonic() > end_s:
                break
    return percentile(latencies_ms, 99)


def _print(console: Console, carried: Carried) -> None:
    table = Table(
        "streams", "tokens/s", "p50 ms", "p99 ms", "bare p99 ms", "cores", "µs/token", "bare µs/token",
        "others", box=None,
    )  # fmt: skip
    for level in carried.levels:
        row = asdict(level)
        table.add_row(str(row.pop("streams")), *("-" if x is None else f"{x:.2f}" for x in row.values()))
    console.print(table)
    best = carried.sustained
    told = f"{best.streams} streams × {TOKENS_PER_S:.0f} tokens/s" if best else "none of these levels"
    console.print(f"sustained with p99 ≤ {LIMIT_MS:.0f} ms added: {told}")
    console.print(f"an idle stream takes {carried.kib_per_idle_stream:.1f} KiB")


def _main(role: str, redis_url: str, streams: str, seconds: str) -> None:
    if role == "publish":
        asyncio.run(_Publisher(redis_url).run(int(streams), float(seconds)))
    else:
        print(json.dumps({"p99_ms": asyncio.run(_subscribe(redis_url, float(seconds)))}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
