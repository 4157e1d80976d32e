"""Whether Redis answers, asked on a connection of its own, so that requests are refused early.

A time limit on each request would take a busy moment of the gateway itself for a fault of Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

T = TypeVar("T")
INTERVAL_S = 0.3
LIMIT_S = 0.8
SECOND_CHANCE_S = 0.1
log = structlog.get_logger("headrace.gateway")


class Pulse:
    """Says once that Redis is gone, and once that it is back. `on_change` is told of each."""

    def __init__(self, redis: Redis, on_change: Callable[[bool], None]) -> None:
        self._redis = redis
        self._on_change = on_change
        self._up: bool | None = None
        self._known = asyncio.Event()
        self._down = asyncio.Event()

    @property
    def up(self) -> bool:
        return self._up is True

    async def run(self) -> None:
        while True:
            ping = asyncio.ensure_future(self._ping())
            try:
                if not await _within(ping, LIMIT_S):
                    self._set(False)
                self._set(await ping)
            finally:
                ping.cancel()
            await asyncio.sleep(INTERVAL_S)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises redis's ConnectionError as soon as Redis is known not to answer."""
        task = asyncio.ensure_future(work)
        down = asyncio.ensure_future(self._until_down())
        try:
            await asyncio.wait({task, down}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise RedisConnectionError("Redis does not answer")
        finally:
            for each in (task, down):
                each.cancel()
            await asyncio.gather(task, down, return_exceptions=True)

    async def _until_down(self) -> None:
        await self._known.wait()
        await self._down.wait()

    async def _ping(self) -> bool:
        try:
            await self._redis.ping()
        except (RedisError, OSError):
            return False
        return True

    def _set(self, up: bool) -> None:
        if up != self._up:
            if not up:
                log.warning("redis_unreachable")
            elif self._up is not None:
                log.info("redis_back")
            self._on_change(up)
        self._up = up
        self._known.set()
        if up:
            self._down.clear()
        else:
            self._down.set()


async def _within(task: asyncio.Future[Any], limit_s: float) -> bool:
    # After a busy moment of our own the answer may be there and not yet read.
    for timeout_s in (limit_s, SECOND_CHANCE_S):
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if done:
            return True
    return False
