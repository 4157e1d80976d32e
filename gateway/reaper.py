"""Ends jobs that can never run, also when no worker lives: a deadline is kept by whoever is left."""

from __future__ import annotations

import asyncio

import structlog
from redis.exceptions import RedisError

from gateway.core import Gateway

INTERVAL_S = 1.0
log = structlog.get_logger("headrace.gateway")


async def reap_forever(gateway: Gateway) -> None:
    """Sweeps every pool each `INTERVAL_S`. Says once that Redis is gone, and once that it is back."""
    reachable = True
    while True:
        try:
            ended = await sweep(gateway)
            if ended:
                log.info("jobs_reaped", jobs=ended)
            if not reachable:
                log.info("redis_back")
            reachable = True
        except (RedisError, OSError) as exc:
            if reachable:
                log.warning("redis_unreachable", error=type(exc).__name__)
            reachable = False
        gateway.metrics.redis_up.set(int(reachable))
        await asyncio.sleep(INTERVAL_S)


async def sweep(gateway: Gateway) -> int:
    """One round over all pools. Several gateways may sweep at once. Raises RedisError."""
    pools = await gateway.directory.pools()
    return sum([await gateway.store.reap(name) for name in pools])
