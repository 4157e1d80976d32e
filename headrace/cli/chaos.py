"""`headrace chaos`: jobs under fire against a deployment whose Redis is marked for it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Annotated

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError

from headrace.chaos import MARKER, Crowd, Request, make_requests, report, with_expected
from headrace.cli.connection import EXIT_FAILED, Pool, RedisUrl, run_against
from headrace.cli.options import tell_error
from headrace.client import Client
from headrace.config import CommonSettings
from headrace.connect import connect
from headrace.keys import Keys

FREEZE_S = (1.0, 8.0)


class Fire:
    """Kills connections and flushes scripts, and freezes and kills the processes it was given, at random."""

    def __init__(self, redis: Redis, pids: list[int], *, seed: int, pause_s: float) -> None:
        self._redis, self._pids = redis, pids
        self._rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self._pause_s = pause_s
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        names = ["connections", "scripts", *(["freeze", "kill"] if self._pids else [])]
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._pause_s)
            name = self._rng.choice(names)
            with suppress(RedisError, OSError):
                await self._act(name)
                self.done[name] += 1

    async def _act(self, name: str) -> None:
        if name == "connections":
            for kind in ("normal", "pubsub"):
                await self._redis.client_kill_filter(_type=kind, skipme=True)
        elif name == "scripts":
            await self._redis.script_flush()
        elif self._pids:
            await self._hit(self._rng.choice(self._pids), name)

    async def _hit(self, pid: int, name: str) -> None:
        if name == "kill":
            self._pids.remove(pid)
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.uniform(*FREEZE_S))
        finally:
            os.kill(pid, signal.SIGCONT)


def register(app: typer.Typer) -> None:
    app.command()(chaos)


def chaos(
    redis_url: RedisUrl = None,
    pool: Pool = None,
    jobs: Annotated[int, typer.Option(min=1)] = 100,
    tokens: Annotated[int, typer.Option(min=1, help="Of each job.")] = 120,
    at_once: Annotated[int, typer.Option(min=1, help="Jobs under way at a time.")] = 16,
    seconds: Annotated[float, typer.Option(min=1, help="Keep the fire up for so long.")] = 60,
    pause_s: Annotated[float, typer.Option(min=0.01, help="Mean time between two faults.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of jobs and faults.")] = 1,
    pid: Annotated[
        list[int] | None, typer.Option(help="A worker on this host, to be frozen and killed too.")
    ] = None,
) -> None:
    """Run jobs while connections are killed; compare every answer with an undisturbed run.

    Only against a Redis that is marked for it: `redis-cli SET hr:chaos allowed`.
    """

    async def action(settings: CommonSettings) -> int:
        redis = connect(settings.redis_url)
        try:
            if await redis.get(MARKER) != b"allowed":
                tell_error(f"this Redis is not marked for it: SET {MARKER} allowed")
                return EXIT_FAILED
            fire = Fire(redis, list(pid or []), seed=seed, pause_s=pause_s)
            return await _rehearse(settings, redis, fire, make_requests(seed, jobs, tokens), at_once, seconds)
        finally:
            await redis.aclose()

    run_against(redis_url, pool, action)


async def _rehearse(
    settings: CommonSettings, redis: Redis, fire: Fire, requests: list[Request], at_once: int, seconds: float
) -> int:
    run_id = f"chaos-{time.time_ns():x}"
    async with Client(settings.redis_url, settings.pool) as client:
        calm = Crowd(client, at_once=at_once)
        requests = with_expected(requests, await calm.run(requests, f"{run_id}-calm"))
        burning = asyncio.create_task(fire.run())
        crowd, rounds, end_s = Crowd(client, at_once=at_once), 0, time.monotonic() + seconds
        while rounds == 0 or time.monotonic() < end_s:
            await crowd.run(requests, f"{run_id}-{rounds}")
            rounds += 1
        burning.cancel()
        await asyncio.gather(burning, return_exceptions=True)
    figures = report(crowd.heard) | dict(fire.done) | {"dead": await redis.xlen(Keys(settings.pool).dead)}
    for heard in [heard for heard in crowd.heard if heard.fault][:10]:
        tell_error(f"{heard.job_id} ({heard.request.kind}): {heard.fault}")
    typer.echo(json.dumps(figures, indent=2))
    return EXIT_FAILED if figures["bad_jobs"] else 0
