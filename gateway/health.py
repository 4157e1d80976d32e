"""Probes and metrics. /healthz asks nothing of Redis; /readyz and /metrics ask within a second."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import HttpMethod, Response, get, route
from redis.exceptions import RedisError

from gateway.core import Gateway, GatewayHere

PROBE_TIMEOUT_S = 1.0
PROBE = [HttpMethod.GET, HttpMethod.HEAD]
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Health(msgspec.Struct, frozen=True):
    status: str = "ok"


class PoolHealth(msgspec.Struct, frozen=True):
    models: list[str]
    workers: list[str]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """`workers` may be empty and the gateway ready: jobs then wait for one."""

    ready: bool
    redis: bool
    pools: dict[str, PoolHealth] = {}


@route("/healthz", http_method=PROBE, tags=["Operation"], summary="The process is alive")
async def healthz() -> Health:
    return Health()


@route("/readyz", http_method=PROBE, tags=["Operation"], summary="Requests can be taken in")
async def readyz(gateway: GatewayHere) -> Response[Readiness]:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            pools = await gateway.directory.pools(fresh=True)
            await gateway.store.load_scripts()
    except (RedisError, OSError):
        pools = {}
    if not pools or not gateway.pulse.up:
        return Response(Readiness(ready=False, redis=False), status_code=503, headers={"Retry-After": "1"})
    shown = {name: PoolHealth(sorted(pool.models), sorted(pool.cards)) for name, pool in pools.items()}
    return Response(Readiness(ready=True, redis=True, pools=shown))


@get("/metrics", media_type=EXPOSITION, tags=["Operation"], summary="Prometheus metrics")
async def metrics(gateway: GatewayHere) -> Response[Any]:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await _ask_pools(gateway)
    except (RedisError, OSError):
        gateway.metrics.redis_up.set(0)
    return Response(gateway.metrics.exposition(), media_type=EXPOSITION)


async def _ask_pools(gateway: Gateway) -> None:
    pools = await gateway.directory.pools()
    gateway.metrics.set_tenants(await gateway.limits.used_by_tenants(list(pools)))
    for name, pool in pools.items():
        depth = await gateway.store.depth(name)
        gateway.metrics.set_pool(
            name,
            entries=depth.entries,
            running=depth.running,
            workers=len(pool.cards),
            estimates=depth.estimates,
        )
