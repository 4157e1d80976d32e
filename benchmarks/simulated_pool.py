"""Workers with a step time instead of weights, driving the real scripts against a real Redis.

They do what a worker's event loop does: pick and claim what fits, and emit one call a step for the batch.
What a call costs the server is read from its slow log, set to keep every command.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis

from benchmarks.machine import process_cpu_s
from headrace.connect import connect
from headrace.keys import Keys
from headrace.lua_source import load_script
from headrace.messages import Choice, Delta, End, Event, Finish, Result, Usage
from headrace.script_types import ClaimItem, EmitItem, Final
from headrace.scripts import Scripts

POOL = "scale"
TOKENS = (20, 100)  # shortest and longest answer
TENANTS = 4
PROMPT = "the quick brown fox jumps over the lazy dog " * 8
LEASE_MS = 60_000
BUDGET_TOKENS = 100_000
FEED_S = 0.05
WARM_UP_S = 2.0
READ_BYTES = 2**20
FIXED_KEYS = {"pick": 12, "claim": 13, "emit": 9}  # the others come in threes, one three a job
SLOW_LOG_LENGTH = 20_000


@dataclass(slots=True)
class SimulatedJob:
    job_id: str
    job_class: str
    entry_id: str
    epoch: int
    output_tokens: int
    seq: int = 0
    ids: list[int] = field(default_factory=list)

    def step(self) -> EmitItem:
        """The next token; with the last one, the end."""
        self.ids.append(len(self.ids))
        events: list[Event] = [Delta(seq=self._next(), text=" word", ids=[self.ids[-1]])]
        final = None
        if self.done:
            usage = Usage(prompt_tokens=80, completion_tokens=len(self.ids), total_tokens=80 + len(self.ids))
            events += [
                Finish(seq=self._next(), reason="length"),
                End(seq=self._next(), status="done", usage=usage),
            ]
            choice = Choice(index=0, text=" word" * len(self.ids), ids=self.ids, finish_reason="length")
            final = Final("done", usage=usage, result=Result(choices=[choice]))
        return EmitItem(self.job_id, self.job_class, self.entry_id, self.epoch, events, final, 80)

    @property
    def done(self) -> bool:
        return len(self.ids) >= self.output_tokens

    def _next(self) -> int:
        self.seq += 1
        return self.seq


@dataclass(slots=True)
class Tally:
    """What the workers of one run did together. Times of calls are in ms, as the callers waited."""

    tokens: int = 0
    ended: int = 0
    claimed: Counter[str] = field(default_factory=Counter)  # output tokens of claimed jobs, by tenant
    claim_ms: list[float] = field(default_factory=list)
    emit_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)  # how far behind its time a step ended
    waiting: Counter[str] = field(default_factory=Counter)  # jobs submitted and not claimed, by tenant
    submitted: int = 0

    def begin_again(self) -> None:
        """Forgets what was measured; not the jobs."""
        self.tokens = 0
        for times in (self.claim_ms, self.emit_ms, self.late_ms):
            times.clear()


class SimulatedWorker:
    """One worker: `slots` jobs at a time, a token of each every `step_s`; 0: as fast as the calls go."""

    def __init__(self, name: str, scripts: Scripts, tally: Tally, *, slots: int, step_s: float) -> None:
        self._name = name
        self._scripts = scripts
        self._tally = tally
        self._slots = slots
        self._step_s = step_s
        self._jobs: list[SimulatedJob] = []

    async def run(self, stopped: Callable[[], bool]) -> None:
        await asyncio.sleep(random.uniform(0, self._step_s))  # real workers' steps don't fall together
        at = time.perf_counter()
        while not stopped():
            if len(self._jobs) < self._slots:
                await self._claim(self._slots - len(self._jobs))
            at = max(at + self._step_s, time.perf_counter())
            await asyncio.sleep(at - time.perf_counter())
            await self._emit()
            self._tally.late_ms.append(1e3 * (time.perf_counter() - at))

    async def _claim(self, room: int) -> None:
        begin = time.perf_counter()
        picked = await self._scripts.pick(self._name, room, budget_tokens=BUDGET_TOKENS, lease_ms=LEASE_MS)
        items = [
            ClaimItem(entry.job_class, entry.entry_id, entry.fields[b"id"].decode())
            for entry in picked.entries
        ]
        claims = await self._scripts.claim(self._name, items, lease_ms=LEASE_MS, max_attempts=3)
        if items:
            self._tally.claim_ms.append(1e3 * (time.perf_counter() - begin))
        for entry, item, claim in zip(picked.entries, items, claims, strict=True):
            tokens, tenant = int(entry.fields[b"max_tokens"]), entry.fields[b"tenant"].decode()
            self._tally.claimed[tenant] += tokens
            self._tally.waiting[tenant] -= 1
            self._jobs.append(SimulatedJob(item.job_id, item.job_class, item.entry_id, claim.epoch, tokens))

    async def _emit(self) -> None:
        if not self._jobs:
            return
        items = [job.step() for job in self._jobs]
        begin = time.perf_counter()
        outcomes = await self._scripts.emit(items)
        self._tally.emit_ms.append(1e3 * (time.perf_counter() - begin))
        refused = [outcome for outcome in outcomes if outcome.kind != "ok"]
        if refused:
            raise RuntimeError(f"emit refused {refused[0]}")
        self._tally.tokens += len(items)
        self._tally.ended += sum(job.done for job in self._jobs)
        self._jobs = [job for job in self._jobs if not job.done]


@dataclass(frozen=True, slots=True)
class ServerCost:
    """What a script costs the server, median µs: a call, and its part for one job."""

    calls: int
    call_us: float
    item_us: float


@dataclass(frozen=True, slots=True)
class PoolRun:
    workers: int
    tokens_per_s: float
    tally: Tally
    costs: dict[str, ServerCost]
    server_busy: float  # share of one core
    client_cpu_us: float  # of this process, a token
    redis_mib: float


async def run_pool(
    redis_url: str, server_pid: int, workers: int, *, slots: int, step_s: float, seconds: float
) -> PoolRun:
    """A pool in a steady state: new jobs come as others end. Leaves the server empty."""
    redis = connect(redis_url, max_connections=workers + 8)
    try:
        await redis.flushall()
        await redis.config_set("slowlog-max-len", SLOW_LOG_LENGTH)
        tally, keys = Tally(), Keys(POOL)
        await _submit(redis, keys, tally, [i % TENANTS for i in range(workers * slots + 256)])
        await _sort_all(Scripts(redis, keys))
        reader = asyncio.create_task(_gateway(redis_url))
        feeder = asyncio.create_task(_feed(redis, keys, tally))
        try:
            return await _measured(redis, server_pid, tally, workers, slots, step_s, seconds)
        finally:
            await _ended(reader, feeder)
            await redis.flushall()
    finally:
        await redis.aclose()


async def _measured(
    redis: Redis, server_pid: int, tally: Tally, workers: int, slots: int, step_s: float, seconds: float
) -> PoolRun:
    stop = asyncio.Event()
    pool = [
        SimulatedWorker(f"w{n}", Scripts(redis, Keys(POOL)), tally, slots=slots, step_s=step_s)
        for n in range(workers)
    ]
    tasks = [asyncio.create_task(worker.run(stop.is_set)) for worker in pool]
    await asyncio.sleep(WARM_UP_S)
    tally.begin_again()
    await redis.config_set("slowlog-log-slower-than", 0)
    begin, server_s, client_s = time.perf_counter(), process_cpu_s(server_pid), time.process_time()
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    wall_s, tokens = time.perf_counter() - begin, tally.tokens
    server_s, client_s = process_cpu_s(server_pid) - server_s, time.process_time() - client_s
    await redis.config_set("slowlog-log-slower-than", -1)
    stop.set()
    await asyncio.gather(*tasks)
    memory = (await redis.info("memory"))["used_memory"] / 2**20
    return PoolRun(
        workers=workers,
        tokens_per_s=tokens / wall_s,
        tally=tally,
        costs=await server_costs(redis),
        server_busy=server_s / wall_s,
        client_cpu_us=1e6 * client_s / max(1, tokens),
        redis_mib=memory,
    )


async def server_costs(redis: Redis) -> dict[str, ServerCost]:
    """Medians over the last calls in the slow log, by script."""
    names = {load_script(name).sha: name for name in FIXED_KEYS}
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for entry in await redis.slowlog_get(SLOW_LOG_LENGTH):
        words = entry["command"].split(b" ")
        name = names.get(words[1].decode()) if words[0].upper() == b"EVALSHA" else None
        if name is not None:
            calls[name].append((entry["duration"], (int(words[2]) - FIXED_KEYS[name]) // 3))
    return {name: _cost(found) for name, found in calls.items()}


def _cost(calls: Sequence[tuple[int, int]]) -> ServerCost:
    each = [duration / count for duration, count in calls if count]
    return ServerCost(
        calls=len(calls),
        call_us=statistics.median(duration for duration, _ in calls),
        item_us=statistics.median(each) if each else float("nan"),
    )


async def fairness(redis_url: str, workers: int, slots: int = 8) -> float:
    """How much the best served of four tenants got for each token of the worst served, while all had work
    waiting: the first tenant's jobs, half of all, came before the others'."""
    redis = connect(redis_url, max_connections=workers + 8)
    try:
        await redis.flushall()
        tally, keys = Tally(), Keys(POOL)
        each = max(60, 2 * workers * slots)
        crowd = [0] * (3 * each) + [1 + i % (TENANTS - 1) for i in range(each * (TENANTS - 1))]
        await _submit(redis, keys, tally, crowd)
        await _sort_all(Scripts(redis, keys))
        pool = [
            SimulatedWorker(f"w{n}", Scripts(redis, keys), tally, slots=slots, step_s=0.0)
            for n in range(workers)
        ]
        await asyncio.gather(*(worker.run(lambda: min(tally.waiting.values()) < slots) for worker in pool))
        await redis.flushall()
        return max(tally.claimed.values()) / min(tally.claimed.values())
    finally:
        await redis.aclose()


async def _submit(redis: Redis, keys: Keys, tally: Tally, tenants: Sequence[int]) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        for number in tenants:
            tenant = f"tenant-{number}"
            tally.submitted += 1
            tally.waiting[tenant] += 1
            fields: dict[Any, Any] = {"id": f"job-{tally.submitted}", "tenant": tenant, "prompt": PROMPT}
            fields["max_tokens"] = random.randint(*TOKENS)
            pipe.xadd(keys.queue("normal"), fields)
        await pipe.execute()


async def _sort_all(scripts: Scripts) -> None:
    """Sorts what was submitted, as workers would have as it came."""
    before = -1
    while True:
        picked = await scripts.pick("sorter", 0, budget_tokens=0, lease_ms=LEASE_MS)
        if picked.waiting == before:
            return
        before = picked.waiting


async def _feed(redis: Redis, keys: Keys, tally: Tally) -> None:
    """A new job for each that has ended."""
    fed = 0
    while True:
        ended = tally.ended
        if ended > fed:
            await _submit(redis, keys, tally, [n % TENANTS for n in range(fed, ended)])
            fed = ended
        await asyncio.sleep(FEED_S)


async def _gateway(redis_url: str) -> None:
    """Reads all live events and throws them away: a gateway's part of the server's work."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        reader, writer = await asyncio.open_unix_connection(parts.path)
    else:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 6379)
    try:
        writer.write(f"PSUBSCRIBE {Keys(POOL).live('')}*\r\n".encode())
        while await reader.read(READ_BYTES):
            pass
    finally:
        writer.close()


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
