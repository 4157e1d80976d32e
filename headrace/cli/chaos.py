"""`headrace chaos`: jobs under fire against a deployment whose Redis is marked for it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import typer
from redis.asyncio import Redis

from headrace.chaos import MARKER, CalmError, Crowd, Request, make_requests, report, with_expected
from headrace.cli.connection import EXIT_FAILED, Pool, RedisUrl, run_against
from headrace.cli.fire import Fire
from headrace.cli.options import tell_error
from headrace.client import Client
from headrace.config import CommonSettings
from headrace.connect import connect
from headrace.keys import Keys

SHOWN = 10


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
    execute: Annotated[
        list[str] | None,
        typer.Option("--exec", help="A command to be run as a fault, like 'docker restart worker-1'."),
    ] = None,
) -> None:
    """Run jobs while things are killed; compare every answer with an undisturbed run.

    Prints jobs, tokens, faults, takeovers and gaps as JSON; ends with 1 if any answer differs. Only against
    a Redis that is marked for it: `redis-cli SET hr:chaos allowed`.
    """

    async def action(settings: CommonSettings) -> int:
        redis = connect(settings.redis_url)
        try:
            if problem := await _unfit(redis, settings.pool):
                tell_error(problem)
                return EXIT_FAILED
            fire = Fire(redis, pid or [], execute or [], seed=seed, pause_s=pause_s)
            requests = make_requests(seed, jobs, tokens)
            return await _rehearse(settings, redis, fire, requests, at_once, seconds)
        except CalmError as problem:
            tell_error(str(problem))
            return EXIT_FAILED
        finally:
            await redis.aclose()

    run_against(redis_url, pool, action)


async def _unfit(redis: Redis, pool: str) -> str:
    """Why this deployment is not to be fired at; empty if it may be."""
    if await redis.get(MARKER) != b"allowed":
        return f"this Redis is not marked for it: SET {MARKER} allowed"
    seconds, micros = await redis.time()
    now_ms = seconds * 1000 + micros // 1000
    if not await redis.zcount(Keys(pool).workers, now_ms, "+inf"):
        return f"no worker serves the pool {pool}"
    return ""


async def _rehearse(
    settings: CommonSettings, redis: Redis, fire: Fire, requests: list[Request], at_once: int, seconds: float
) -> int:
    run_id = f"chaos-{time.time_ns():x}"
    async with Client(settings.redis_url, settings.pool) as client:
        calm = Crowd(client, at_once=at_once)
        requests = with_expected(requests, await calm.run(requests, f"{run_id}-calm"))
        crowd = Crowd(client, at_once=at_once)
        await _under_fire(fire, crowd, requests, run_id, seconds)
    figures: dict[str, Any] = {
        **report(crowd.heard),
        "disturbances": dict(sorted(fire.done.items())),
        "refused": dict(sorted(fire.failed.items())),
        "dead": await redis.xlen(Keys(settings.pool).dead),
    }
    for heard in [heard for heard in crowd.heard if heard.fault][:SHOWN]:
        tell_error(f"{heard.job_id} ({heard.request.kind}): {heard.fault}")
    typer.echo(json.dumps(figures, indent=2))
    if not fire.done:
        tell_error("nothing was disturbed: does this user have the rights (CLIENT, SCRIPT FLUSH)?")
    return EXIT_FAILED if figures["bad_jobs"] or not fire.done else 0


async def _under_fire(fire: Fire, crowd: Crowd, requests: list[Request], run_id: str, seconds: float) -> None:
    """All requests again and again, until the time is over and the last round has ended."""
    burning = asyncio.create_task(fire.run())
    rounds, end_s = 0, time.monotonic() + seconds
    try:
        while rounds == 0 or time.monotonic() < end_s:
            await crowd.run(requests, f"{run_id}-{rounds}")
            rounds += 1
    finally:
        burning.cancel()
        await asyncio.gather(burning, return_exceptions=True)
