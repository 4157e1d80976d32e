"""Clients of Redis, every setting explicit: undecoded replies, RESP2, timeouts, no silent second try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
import redis.connection
from redis.asyncio.cluster import ClusterParser as AsyncClusterParser
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.cluster import ClusterParser
from redis.retry import Retry

from headrace.cluster import ClusterRedis
from headrace.connections import (
    Asking,
    SeekingConnection,
    SeekingTlsConnection,
    SyncSeekingConnection,
    SyncSeekingTlsConnection,
    TcpConnection,
    TlsConnection,
    UnixConnection,
)
from headrace.places import Place, SlotMap, SlotOwner, key_slot
from headrace.redis_url import Address, RedisUrl, parse_redis_url
from headrace.sentinel import master_of

HEALTH_CHECK_S = 15
BLOCK_MARGIN_S = 5.0
POOL_WAIT_S = 20.0
ASK_S = 1.0  # for one sentinel or node to say where a server is, before the next is asked

_BY_SCHEME = {"redis": TcpConnection, "rediss": TlsConnection, "unix": UnixConnection}
_SEEKING = {"redis": SeekingConnection, "rediss": SeekingTlsConnection}
_SYNC_SEEKING = {"redis": SyncSeekingConnection, "rediss": SyncSeekingTlsConnection}


def connect(
    url: str, *, blocking: bool = False, timeout_s: float = 5.0, max_connections: int = 32, tag: str = ""
) -> redis.asyncio.Redis:
    """An asyncio client of any URL that `parse_redis_url` takes. Nothing is sent before the first command.

    `blocking=True` is for XREAD BLOCK and the like: `timeout_s` is then the longest BLOCK, and the socket
    waits longer. Nothing is sent twice by itself: an XADD whose reply was lost would be written twice.
    Callers beyond `max_connections` wait for a free connection; on a cluster there are so many for each node.
    A cluster's client sends each command to the node of its key. With a `tag` it is instead a plain client of
    the node that has the keys with this hash tag, for code that needs its connections as they are.
    """
    parsed = parse_redis_url(url)
    options = _options(url, blocking, timeout_s) | {
        "max_connections": max_connections,
        "timeout": POOL_WAIT_S,
        "retry": AsyncRetry(NoBackoff(), 0),
    }
    if parsed.kind == "server":
        return redis.asyncio.Redis.from_pool(_pool(parsed.server_url, _BY_SCHEME, options))
    asking = _asking(parsed)
    if parsed.kind == "cluster":
        options["parser_class"] = AsyncClusterParser

    def seeking(place: Place) -> redis.asyncio.ConnectionPool:
        return _pool(parsed.server_url, _SEEKING, {**options, "place": place, "asking": asking})

    def fixed(node: Address) -> redis.asyncio.ConnectionPool:
        pool = _pool(parsed.server_url, _BY_SCHEME, options)
        pool.connection_kwargs.update(host=node[0], port=node[1])
        return pool

    if parsed.kind == "cluster" and not tag:
        slots = SlotMap(parsed.nodes)
        return ClusterRedis(slots, asking, seeking(SlotOwner(slots, None)), fixed)
    return redis.asyncio.Redis.from_pool(seeking(_place(parsed, tag)))


def retry_pause_s(failures: int, most_s: float) -> float:
    """How long to wait after so many failures on end: 50 ms after the first, then doubled, up to `most_s`."""
    return min(0.025 * 2.0 ** min(failures, 16), most_s)


def connect_sync(
    url: str, *, blocking: bool = False, timeout_s: float = 5.0, max_connections: int = 4, tag: str = ""
) -> redis.Redis:
    """The same as `connect`, for threads of their own (the lease's). On a cluster it needs a `tag`."""
    parsed = parse_redis_url(url)
    options = _options(url, blocking, timeout_s) | {
        "max_connections": max_connections,
        "timeout": POOL_WAIT_S,
        "retry": Retry(NoBackoff(), 0),
    }
    pool: Any = redis.BlockingConnectionPool.from_url(parsed.server_url, **options)
    if parsed.kind != "server":
        pool.connection_class = _SYNC_SEEKING[_scheme(parsed.server_url)]
        pool.connection_kwargs.update(place=_place(parsed, tag), asking=_asking(parsed))
    if parsed.kind == "cluster":
        pool.connection_kwargs["parser_class"] = ClusterParser
    return redis.Redis.from_pool(pool)


def connections(url: str, *, connect_timeout_s: float) -> redis.asyncio.ConnectionPool:
    """For those who speak over connections of their own: makes them, with no limit on the time of a reply.

    On a cluster each goes to any master: messages reach them all.
    """
    parsed = parse_redis_url(url)
    options: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_connect_timeout": connect_timeout_s,
    }
    if parsed.kind == "server":
        return _pool(parsed.server_url, _BY_SCHEME, options, redis.asyncio.ConnectionPool)
    options |= {"place": _place(parsed, ""), "asking": _asking(parsed)}
    return _pool(parsed.server_url, _SEEKING, options, redis.asyncio.ConnectionPool)


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


def _pool(
    url: str,
    classes: Mapping[str, type],
    options: Mapping[str, Any],
    kind: type[redis.asyncio.ConnectionPool] = redis.asyncio.BlockingConnectionPool,
) -> redis.asyncio.ConnectionPool:
    pool: Any = kind.from_url(url, **options)
    pool.connection_class = classes[_scheme(url)]
    return pool


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _place(parsed: RedisUrl, tag: str) -> Place:
    if parsed.kind == "sentinel":
        return master_of(parsed.nodes, parsed.service)
    return SlotOwner(SlotMap(parsed.nodes), key_slot(tag) if tag else None)


def _asking(parsed: RedisUrl) -> Asking:
    """Sentinels have users of their own, and a cluster's nodes those of the URL; TLS as for the servers."""
    options: dict[str, Any] = redis.connection.parse_url(parsed.server_url)
    tls = options.pop("connection_class", None) is redis.SSLConnection
    for name in ("host", "port", "db"):
        options.pop(name, None)
    if parsed.kind == "sentinel":
        options |= {"username": parsed.sentinel_user, "password": parsed.sentinel_password}
    limits = {"socket_timeout": ASK_S, "socket_connect_timeout": ASK_S}
    return Asking(tls, {**options, **limits, "protocol": 2, "decode_responses": False})
