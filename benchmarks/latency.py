"""What Headrace itself adds: to a lone job's first token, to a job that joins a busy batch, and when idle."""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from redis.asyncio import Redis
from rich.console import Console

from benchmarks import machine
from benchmarks.figures import percentile, token_gaps_s
from benchmarks.load import LoadDriver
from benchmarks.serving import Serving, own_redis, serving
from benchmarks.workload import Request, forced, warm_up
from headrace.connect import connect
from headrace.follow import Follower
from headrace.keys import Keys

_POOL = "bench"
_JOINING_TOKENS = 16
_SHORT = {"prompt": "Hi"}  # prefilling it costs about what one decode step costs


@dataclass(frozen=True, slots=True)
class Latency:
    """`overhead_…`: a lone job's time to the first token, less one step of the model (its own prefill).

    `joining_steps`: steps of a busy batch from a job's submission to its first token, as Redis saw their
    events; the step under way at the submission is the first. One step more is counted where a step's events
    were still on their way to Redis.
    """

    overhead_p50_ms: float
    overhead_p99_ms: float
    step_ms: float
    joining_steps: list[int]
    idle_cpu: float  # share of one core
    idle_commands_per_s: float

    @property
    def joined_within_two(self) -> float:
        return sum(steps <= 2 for steps in self.joining_steps) / len(self.joining_steps)


def measure(
    console: Console, results: Path, settings: Mapping[str, str | int], *, samples: int, idle_s: float
) -> Latency:
    """Runs all three measurements on one worker, prints and writes them."""
    results.mkdir(parents=True, exist_ok=True)
    latency = asyncio.run(_measure(results, settings, samples, idle_s))
    console.print(
        f"lone job: {latency.overhead_p50_ms:.1f} ms (p99 {latency.overhead_p99_ms:.1f}) from queue to "
        f"first token beyond the model's own {latency.step_ms:.1f} ms"
    )
    console.print(
        f"joining a busy batch: first token within two steps in {latency.joined_within_two:.0%} of "
        f"{len(latency.joining_steps)} jobs, at most {max(latency.joining_steps)}"
    )
    console.print(
        f"idle: {latency.idle_cpu:.1%} of a core, {latency.idle_commands_per_s:.1f} Redis commands a second, "
        "those within scripts included"
    )
    raw = {"machine": machine.describe(), "settings": dict(settings), **asdict(latency)}
    path = results / f"latency-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(raw)))
    return latency


async def _measure(results: Path, settings: Mapping[str, str | int], samples: int, idle_s: float) -> Latency:
    with own_redis() as server:
        async with serving(server, _POOL, settings, results / "worker-latency.log") as worker:
            overheads, step_ms = await worker.during(_alone(server.url, samples))
            joining = await worker.during(joining_steps(server.url, samples))
            idle_cpu, commands = await idle(worker, idle_s)
    return Latency(percentile(overheads, 50), percentile(overheads, 99), step_ms, joining, idle_cpu, commands)


async def _alone(redis_url: str, samples: int) -> tuple[list[float], float]:
    async with LoadDriver(redis_url, _POOL) as driver:
        await driver.run(warm_up())
        return await lone_jobs(driver, samples)


async def lone_jobs(driver: LoadDriver, samples: int) -> tuple[list[float], float]:
    """Of each of `samples` jobs on an idle worker, ms to the first token beyond a step; and a step's ms."""
    firsts, gaps = [], []
    for _ in range(samples):
        await asyncio.sleep(0.2)  # the worker is to be asleep again, as it is when a lone job comes
        [job] = await driver.run([forced(_SHORT, 8)])
        firsts.append(1e3 * job.first_token_s)
        gaps += [1e3 * gap for gap in token_gaps_s(job)]
    step_ms = statistics.median(gaps)
    return [first - step_ms for first in firsts], step_ms


async def joining_steps(redis_url: str, samples: int) -> list[int]:
    """How many steps each of `samples` jobs needs to get its first token beside four that are generating."""
    redis, follower = connect(redis_url, max_connections=1), Follower(redis_url)
    await follower.start()
    neighbours = [Neighbour(redis, follower) for _ in range(4)]
    try:
        await asyncio.gather(*(neighbour.begin(2 * _JOINING_TOKENS * samples) for neighbour in neighbours))
        found = [await _join(redis, follower, neighbours[0]) for _ in range(samples)]
        return [steps for steps in found if steps is not None]
    finally:
        await asyncio.gather(*(neighbour.end() for neighbour in neighbours))
        await follower.close()
        await redis.aclose()


class Neighbour:
    """A long job that tells the steps of the engine by its events: one a step while it generates."""

    def __init__(self, redis: Redis, follower: Follower) -> None:
        self.keys = Keys(_POOL)
        self.job_id = f"neighbour-{secrets.token_hex(6)}"
        self.seq = 0
        self._redis, self._follower = redis, follower
        self._started = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def begin(self, output_tokens: int) -> None:
        """Returns when it has its first token."""
        await submit(self._redis, self.keys, self.job_id, forced(_SHORT, output_tokens))
        self._reader = asyncio.create_task(self._read())
        await self._started.wait()

    async def end(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._redis.hset(self.keys.job(self.job_id), "cancel", "1")  # type: ignore[misc]

    async def _read(self) -> None:
        async for event in self._follower.follow(self.keys, self.job_id):
            self.seq = event.seq
            self._started.set()


async def submit(redis: Redis, keys: Keys, job_id: str, request: Request) -> None:
    await redis.xadd(keys.queue(request.job_class), request.entry(job_id))


async def _join(redis: Redis, follower: Follower, neighbour: Neighbour) -> int | None:
    """Steps to the first token of one more job; None when it was seen too late to tell."""
    await asyncio.sleep(random.uniform(0, 0.05))  # anywhere within a step
    job_id, keys = f"joining-{secrets.token_hex(6)}", neighbour.keys
    request = forced(_SHORT, _JOINING_TOKENS)
    async with redis.pipeline(transaction=True) as pipe:  # the step at the very moment of the submission
        pipe.xadd(keys.queue(request.job_class), request.entry(job_id))
        pipe.xlen(keys.log(neighbour.job_id))
        _, step_at_submission = await pipe.execute()
    first_step: int | None = None
    async for event in follower.follow(keys, job_id):
        if event.seq == 1:
            first_step = await _step_of_first_token(redis, keys, job_id, neighbour)
    return None if first_step is None else first_step - int(step_at_submission)


async def _step_of_first_token(redis: Redis, keys: Keys, job_id: str, neighbour: Neighbour) -> int | None:
    """The neighbour's step in which the job's first token came: both logs grow by one event a step."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.xlen(keys.log(job_id))
        pipe.xlen(keys.log(neighbour.job_id))
        own, neighbours = map(int, await pipe.execute())
    return neighbours - (own - 1) if own < _JOINING_TOKENS else None


async def idle(worker: Serving, seconds: float) -> tuple[float, float]:
    """Share of a core and Redis commands a second of a worker with nothing to do."""
    await asyncio.sleep(1.0)
    cpu_s, commands = machine.process_cpu_s(worker.pid), await _commands(worker.redis)
    start = time.perf_counter()
    await asyncio.sleep(seconds)
    wall_s = time.perf_counter() - start
    used_s, done = machine.process_cpu_s(worker.pid) - cpu_s, await _commands(worker.redis) - commands
    return used_s / wall_s, (done - 1) / wall_s  # one of them is our own INFO


async def _commands(redis: Redis) -> int:
    info = await redis.info("stats")
    return int(info["total_commands_processed"])
