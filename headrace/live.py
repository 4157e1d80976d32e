"""The live channels of any number of jobs over one pub/sub connection.

A channel is a hint, never the truth: whatever may have been missed (a broken connection, a late or unexpected
acknowledgement, a full mailbox) only marks the mailboxes, and their readers look into the log.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import structlog
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from headrace.connect import connections
from headrace.log import decode_live
from headrace.messages import Event

log = structlog.get_logger("headrace.live")

MAILBOX_EVENTS = 256
SUBSCRIBE_BATCH = 500
READ_BYTES = 65_536
PING_S = 1.0
SILENT_S = 5.0
WRITE_TIMEOUT_S = 5.0
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0


class Mailbox:
    """What its one reader has not yet taken. `stale`: something may have been missed; the log tells."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._heard = True
        self.stale = False

    def put(self, event: Event) -> None:
        if len(self._events) >= MAILBOX_EVENTS:
            self.mark_stale()
            return
        self._events.append(event)
        self._wake()

    def mark_stale(self) -> None:
        """The log holds all that waits here, so it can go."""
        self._events.clear()
        self.stale = True
        self._wake()

    def fell_silent(self) -> bool:
        """Whether its reader waits and nothing has come since this was last asked; then not the next time."""
        silent = not self._heard
        self._heard = silent
        return silent and self._waiter is not None

    async def take(self) -> list[Event] | None:
        """The events that wait, at least one; None when the log must be read."""
        while not self.stale and not self._events:
            # A bare future: an event under a timeout costs more than all else that is done for a token.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.stale:
            self.stale = False
            return None
        events, self._events = self._events, []
        return events

    def _wake(self) -> None:
        self._heard = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _BurstParser(_AsyncHiredisParser):
    """Hands out all that came with one read: a call of redis-py for each message would double its cost."""

    _reader: Any

    async def read_burst(self) -> list[Any]:
        """At least one reply. Raises RedisError and OSError when the connection is broken."""
        replies = [await self.read_response()]
        while (reply := self._reader.gets()) is not NOT_ENOUGH_DATA:
            replies.append(reply)
        return replies


class LiveChannels:
    """Owns the connection. `open` and `shut` never wait: what is wanted is compared with what was sent."""

    def __init__(self, url: str) -> None:
        self._pool = connections(url, connect_timeout_s=WRITE_TIMEOUT_S)
        self._mailboxes: dict[bytes, set[Mailbox]] = {}
        # Of this connection: what was asked for, what of it is not yet answered, and what is live.
        self._sent: set[bytes] = set()
        self._unanswered: dict[bytes, int] = {}
        self._live: set[bytes] = set()
        self._wake = asyncio.Event()
        self._heard_s = 0.0
        self._away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="live-channels")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._pool.aclose()

    def open(self, channel: str) -> Mailbox:
        """A mailbox that is marked stale once the channel is live: then nothing is missed in silence."""
        name, mailbox = channel.encode(), Mailbox()
        self._mailboxes.setdefault(name, set()).add(mailbox)
        if name in self._live:
            mailbox.mark_stale()
        self._wake.set()
        return mailbox

    def shut(self, channel: str, mailbox: Mailbox) -> None:
        name = channel.encode()
        mailboxes = self._mailboxes.get(name, set())
        mailboxes.discard(mailbox)
        if not mailboxes:
            self._mailboxes.pop(name, None)
            self._wake.set()

    async def _run(self) -> None:
        delay_s = RETRY_FIRST_S
        while True:
            await self._wake.wait()
            connection = self._pool.make_connection()
            started_s = time.monotonic()
            try:
                await self._serve(connection)
            except* (RedisError, OSError) as group:
                if not self._away:
                    log.info("live_channels_disconnected", error=type(group.exceptions[0]).__name__)
                self._away = True
            finally:
                self._forget()
                await connection.disconnect(nowait=True)
            delay_s = RETRY_FIRST_S if time.monotonic() - started_s > 1 else min(delay_s * 2, RETRY_MOST_S)
            await asyncio.sleep(delay_s)

    def _forget(self) -> None:
        """The connection is gone, and with it every subscription and an unknown number of messages."""
        self._sent.clear()
        self._unanswered.clear()
        self._live.clear()
        for name in self._mailboxes:
            self._mark_stale(name)
        self._wake.set()

    def _mark_stale(self, name: bytes) -> None:
        for mailbox in self._mailboxes.get(name, ()):
            mailbox.mark_stale()

    async def _serve(self, connection: AbstractConnection) -> None:
        parser = _BurstParser(READ_BYTES)
        connection.set_parser(lambda **_: parser)  # type: ignore[arg-type]
        await connection.connect()
        self._away = False
        self._heard_s = time.monotonic()
        self._wake.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(parser))
            tasks.create_task(self._write(connection))

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    await self._wake.wait()
                self._wake.clear()
                await self._send_changes(connection)
            except TimeoutError:
                if time.monotonic() - self._heard_s > SILENT_S:
                    raise RedisConnectionError("the server does not answer") from None
                await self._send(connection, "PING")

    async def _send_changes(self, connection: AbstractConnection) -> None:
        wanted = set(self._mailboxes)
        new, gone = list(wanted - self._sent), list(self._sent - wanted)
        for start in range(0, len(gone), SUBSCRIBE_BATCH):
            batch = gone[start : start + SUBSCRIBE_BATCH]
            self._sent.difference_update(batch)
            self._live.difference_update(batch)
            await self._send(connection, "UNSUBSCRIBE", *batch)
        for start in range(0, len(new), SUBSCRIBE_BATCH):
            batch = new[start : start + SUBSCRIBE_BATCH]
            self._sent.update(batch)
            for channel in batch:
                self._unanswered[channel] = self._unanswered.get(channel, 0) + 1
            await self._send(connection, "SUBSCRIBE", *batch)

    async def _send(self, connection: AbstractConnection, *command: Any) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await connection.send_packed_command(connection.pack_command(*command), check_health=False)
        except TimeoutError:
            raise RedisConnectionError("the server takes no more commands") from None

    async def _read(self, parser: _BurstParser) -> None:
        while True:
            # All of a burst is put into the mailboxes before any reader goes on: each of them is woken once.
            for reply in await parser.read_burst():
                if isinstance(reply, list) and len(reply) == 3:
                    self._dispatch(reply[0], reply[1], reply[2])
            self._heard_s = time.monotonic()

    def _dispatch(self, kind: bytes, channel: bytes, data: Any) -> None:
        if kind == b"message":
            if mailboxes := self._mailboxes.get(channel):
                _deliver(data, mailboxes)
        elif kind == b"subscribe":
            left = self._unanswered.pop(channel, 1) - 1
            if left > 0:
                self._unanswered[channel] = left
            elif channel in self._sent:
                self._live.add(channel)
                self._mark_stale(channel)


def _deliver(message: Any, mailboxes: set[Mailbox]) -> None:
    """Read once for all who follow the job. What is no event sends them to the log."""
    try:
        event = decode_live(message)
    except (msgspec.DecodeError, TypeError):
        for mailbox in mailboxes:
            mailbox.mark_stale()
        return
    for mailbox in mailboxes:
        mailbox.put(event)
