"""The load driver: submits through Redis as any producer would, follows every job, notes when tokens come."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from benchmarks.workload import Request
from headrace.connect import connect
from headrace.follow import Follower
from headrace.keys import Keys
from headrace.messages import Delta, End


class LoadError(Exception):
    """A job did not end as it should have: the figures of this run mean nothing."""


@dataclass(slots=True)
class JobTimes:
    """One job as its reader saw it; all times in seconds since the run began."""

    job_id: str
    submitted_s: float
    token_s: list[float] = field(default_factory=list)  # one entry a token
    ended_s: float = 0.0

    @property
    def first_token_s(self) -> float:
        """From submission to the first token."""
        return self.token_s[0] - self.submitted_s


class LoadDriver:
    """Runs requests against one pool. Use as an async context manager."""

    def __init__(self, redis_url: str, pool: str) -> None:
        self._keys = Keys(pool)
        self._redis: Redis = connect(redis_url, max_connections=1)  # submissions in the order of arrival
        self._follower = Follower(redis_url)

    async def __aenter__(self) -> LoadDriver:
        await self._follower.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._follower.close()
        await self._redis.aclose()

    async def run(self, requests: Sequence[Request], *, timeout_s: float = 1800.0) -> list[JobTimes]:
        """All of `requests`, each at its time. Raises LoadError, TimeoutError."""
        start = time.perf_counter()
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(self._one(request, start)) for request in requests]
        return [job.result() for job in jobs]

    async def _one(self, request: Request, start: float) -> JobTimes:
        await asyncio.sleep(start + request.arrive_s - time.perf_counter())
        job_id = f"bench-{secrets.token_hex(8)}"
        times = JobTimes(job_id, time.perf_counter() - start)
        queue = self._keys.queue(request.job_class)
        await self._redis.xadd(queue, request.entry(job_id))
        end: End | None = None
        async for event in self._follower.follow(self._keys, job_id):
            if isinstance(event, Delta):
                times.token_s += [time.perf_counter() - start] * len(event.ids)
            elif isinstance(event, End):
                end = event
        times.ended_s = time.perf_counter() - start
        _check(request, times, end)
        return times


def _check(request: Request, times: JobTimes, end: End | None) -> None:
    if end is None or end.status != "done":
        raise LoadError(f"job {times.job_id} ended as {end and end.status}: {end and end.error}")
    told = end.usage.completion_tokens if end.usage else None
    if not request.output_tokens == told == len(times.token_s):
        wrong = f"{request.output_tokens} tokens asked for, {told} reported, {len(times.token_s)} seen"
        raise LoadError(f"job {times.job_id}: {wrong}")
