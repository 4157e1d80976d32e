"""Ends jobs that can never run, also when no worker lives: a deadline is kept by whoever is left."""

from __future__ import annotations

import asyncio

import structlog
from redis.exceptions import RedisError, ResponseError

from gateway.core import Gateway

INTERVAL_S = 1.0
log = structlog.get_logger("headrace.gateway")


async def reap_forever(gateway: Gateway) -> None:
    """Sweeps every pool each `INTERVAL_S`. A pool that cannot be swept keeps no other from it."""
    while True:
        try:
            for name in await gateway.directory.pools():
                await _sweep(gateway, name)
        except (RedisError, OSError) as exc:
            log.debug("reaping_failed", error=type(exc).__name__)  # the pulse tells that Redis is away
        await asyncio.sleep(INTERVAL_S)


async def _sweep(gateway: Gateway, pool: str) -> None:
    """Several gateways may sweep at once."""
    try:
        ended = await gateway.store.reap(pool)
    except ResponseError as exc:
        log.warning("pool_not_swept", pool=pool, error=str(exc)[:80])
        return
    if ended:
        log.info("jobs_reaped", pool=pool, jobs=ended)
