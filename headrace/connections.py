"""Single connections to Redis, for asyncio and for threads.

A connection to a master behind sentinels, or to the owner of a cluster's slot, looks for it as it connects.
When that server says that it is not the one, the connection is dropped, so that the next command looks again,
and the caller sees a ConnectionError: passing trouble, like a server that is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.places import Place, is_elsewhere, is_read_only
from headrace.redis_url import Address

_NOT_THE_MASTER = "the server that was to be the master is none"


class _Careful:
    """Sends under asyncio.timeout: the wait_for of redis-py loses cancellations before Python 3.12, so that a
    task cancelled during a command runs on. Leaves a server that has become a replica: the address may by now
    lead to the new master."""

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

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            if is_read_only(error):
                await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise


class TcpConnection(_Careful, Connection):
    pass


class TlsConnection(_Careful, SSLConnection):
    pass


class UnixConnection(_Careful, UnixDomainSocketConnection):
    pass


@dataclass(frozen=True, slots=True)
class Asking:
    """Asks those that know where a server is, over a connection for each question."""

    tls: bool
    options: Mapping[str, Any]

    async def find(self, place: Place) -> Address:
        """Raises ConnectionError when nobody who was asked can tell."""
        if (known := place.known()) is not None:
            return known
        kind = TlsConnection if self.tls else TcpConnection
        for seed in place.seeds():
            connection = kind(host=seed[0], port=seed[1], **self.options)
            try:
                await connection.send_command(*place.query)
                found = place.read(await connection.read_response(), seed)
            except (RedisError, OSError):
                continue
            finally:
                await connection.disconnect(nowait=True)
            if found is not None:
                return found
        raise RedisConnectionError(place.absent)

    def find_sync(self, place: Place) -> Address:
        """As `find`, for threads."""
        if (known := place.known()) is not None:
            return known
        for seed in place.seeds():
            connection = self.connection_sync(seed)
            try:
                connection.send_command(*place.query)
                found = place.read(connection.read_response(), seed)
            except (RedisError, OSError):
                continue
            finally:
                connection.disconnect()
            if found is not None:
                return found
        raise RedisConnectionError(place.absent)

    def connection_sync(self, address: Address) -> redis.Connection:
        """Not connected yet."""
        kind = redis.SSLConnection if self.tls else redis.Connection
        return kind(host=address[0], port=address[1], **self.options)


class _Seeking:
    """Goes where `place` is, by the word of those whom `asking` asks."""

    host: str
    port: int

    def __init__(self, *, place: Place, asking: Asking, **options: Any) -> None:
        super().__init__(**options)
        self._place = place
        self._asking = asking

    async def connect(self) -> None:
        """Pools call this before each use: a connection to what was the master is made anew."""
        if self.is_connected and self._place.left((self.host, self.port)):  # type: ignore[attr-defined]
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
        if self.is_connected:  # type: ignore[attr-defined]
            return
        self.host, self.port = await self._asking.find(self._place)
        try:
            await super().connect()  # type: ignore[misc]
        except (RedisError, OSError):
            self._place.doubt()
            raise

    async def on_connect(self) -> None:
        await super().on_connect()  # type: ignore[misc]
        if self._place.master_only:
            await self.send_command("ROLE", check_health=False)  # type: ignore[attr-defined]
            with suppress(NoPermissionError):  # a user without +role: the sentinels' word alone
                _require_master(await self.read_response())
        self._place.arrived(self._asking)

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Whoever keeps a connection for long, for channels, learns here that it leads nowhere."""
        if self.is_connected and self._place.left((self.host, self.port)):  # type: ignore[attr-defined]
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise RedisConnectionError("the master is another by now")
        await super().send_packed_command(command, check_health)  # type: ignore[misc]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            if not is_elsewhere(error):
                raise
            self._place.doubt()
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise RedisConnectionError(f"another server is needed: {error}") from error


class SeekingConnection(_Seeking, TcpConnection):
    pass


class SeekingTlsConnection(_Seeking, TlsConnection):
    pass


class _SyncSeeking:
    """As `_Seeking`, for threads."""

    host: str
    port: int
    _sock: Any

    def __init__(self, *, place: Place, asking: Asking, **options: Any) -> None:
        super().__init__(**options)
        self._place = place
        self._asking = asking

    def connect(self) -> None:
        """Pools call this before each use: a connection to what was the master is made anew."""
        if self._sock and self._place.left((self.host, self.port)):
            self.disconnect()  # type: ignore[attr-defined]
        if self._sock:
            return
        self.host, self.port = self._asking.find_sync(self._place)
        try:
            super().connect()  # type: ignore[misc]
        except (RedisError, OSError):
            self._place.doubt()
            raise

    def on_connect(self) -> None:
        super().on_connect()  # type: ignore[misc]
        if self._place.master_only:
            self.send_command("ROLE", check_health=False)  # type: ignore[attr-defined]
            with suppress(NoPermissionError):
                _require_master(self.read_response())
        self._place.arrived(self._asking)

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            if not is_elsewhere(error):
                raise
            self._place.doubt()
            self.disconnect()  # type: ignore[attr-defined]
            raise RedisConnectionError(f"another server is needed: {error}") from error


class SyncSeekingConnection(_SyncSeeking, redis.Connection):
    pass


class SyncSeekingTlsConnection(_SyncSeeking, redis.SSLConnection):
    pass


def _require_master(role: Any) -> None:
    if role[0] != b"master":
        raise RedisConnectionError(_NOT_THE_MASTER)
