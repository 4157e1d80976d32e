"""What is done now and then: ending jobs that can never run, dropping what was kept long enough."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog
from arq.cron import CronJob, cron
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gateway.directory import Directory
from gateway.lua import redis_now_ms
from gateway.responses.records import Records
from headrace.config import TasksSettings
from headrace.keys import Keys, arq_id
from headrace.scripts import Scripts

SETTLE_SECONDS = {5, 35}
REAP_SECONDS = {0, 10, 20, 30, 40, 50}
SWEEP_S = 6.0  # the longest of a worker's tasks says how long those of a dead process wait
ONCE_S = 600  # processes whose clocks differ by less run a sweep once
log = structlog.get_logger("headrace.tasks")


def sweeps(redis: Redis, directory: Directory, settings: TasksSettings) -> Sequence[CronJob]:
    async def reap(_: dict[str, Any]) -> None:
        await reap_pools(redis, directory, settings.retention_ms)

    async def settle(_: dict[str, Any]) -> None:
        await settle_responses(redis, directory)

    return [periodic("reap", reap, REAP_SECONDS), periodic("settle_responses", settle, SETTLE_SECONDS)]


def periodic(name: str, work: Callable[[dict[str, Any]], Awaitable[None]], seconds: set[int]) -> CronJob:
    return cron(work, name=arq_id(name), second=seconds, timeout=SWEEP_S, keep_result=ONCE_S)  # type: ignore[arg-type]


async def settle_responses(redis: Redis, directory: Directory) -> int:
    """How many stored responses got their answer from a job that has ended."""
    settled, now_ms = 0, await redis_now_ms(redis)
    for pool in await directory.pools():
        settled += await Records(redis).settle_ended(pool, now_ms)
    return settled


async def reap_pools(redis: Redis, directory: Directory, retention_ms: int) -> int:
    """How many jobs were ended. Gateways do the same, but there may be none."""
    ended = 0
    for pool in await directory.pools():
        try:
            ended += (await Scripts(redis, Keys(pool)).reap(retention_ms=retention_ms)).ended
        except ResponseError as exc:
            log.warning("pool_not_swept", pool=pool, error=str(exc)[:80])
    return ended
