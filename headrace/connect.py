"""Connections to Redis, every setting explicit: undecoded replies, RESP2, timeouts, no silent second try."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

HEALTH_CHECK_S = 15
BLOCK_MARGIN_S = 5.0
POOL_WAIT_S = 20.0


class _Sender:
    """Sends under asyncio.timeout: the wait_for of redis-py loses cancellations before Python 3.12, so that a
    task cancelled during a command runs on."""

    socket_timeout: float | None

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        timeout_s, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(timeout_s):
                await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except TimeoutError:
            raise RedisTimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = timeout_s


class _TcpConnection(_Sender, Connection):
    pass


class _TlsConnection(_Sender, SSLConnection):
    pass


class _UnixConnection(_Sender, UnixDomainSocketConnection):
    pass


_BY_SCHEME = {"redis": _TcpConnection, "rediss": _TlsConnection, "unix": _UnixConnection}


def _options(url: str, blocking: bool, timeout_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": timeout_s + BLOCK_MARGIN_S if blocking else timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": HEALTH_CHECK_S,
        "retry_on_timeout": False,
    }
    if not url.startswith("unix://"):
        options["socket_keepalive"] = True
    return options


def connect(
    url: str, *, blocking: bool = False, timeout_s: float = 5.0, max_connections: int = 32
) -> redis.asyncio.Redis:
    """An asyncio client of redis://, rediss:// or unix://. Nothing is sent before the first command.

    `blocking=True` is for XREAD BLOCK and the like: `timeout_s` is then the longest BLOCK, and the socket
    waits longer. Nothing is sent twice by itself: an XADD whose reply was lost would be written twice.
    Callers beyond `max_connections` wait for a free connection.
    """
    pool: Any = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=POOL_WAIT_S,
        retry=AsyncRetry(NoBackoff(), 0),
        **_options(url, blocking, timeout_s),
    )
    pool.connection_class = _BY_SCHEME[url.split(":", 1)[0]]
    return redis.asyncio.Redis.from_pool(pool)


def connect_sync(
    url: str, *, blocking: bool = False, timeout_s: float = 5.0, max_connections: int = 4
) -> redis.Redis:
    """The same as `connect`, for threads of their own (the lease's)."""
    pool: Any = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=POOL_WAIT_S,
        retry=Retry(NoBackoff(), 0),
        **_options(url, blocking, timeout_s),
    )
    return redis.Redis.from_pool(pool)
