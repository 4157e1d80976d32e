"""One job's events: its log up to now, then the live channel, and the log again wherever that has a hole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import redis.asyncio
from redis.exceptions import RedisError

from headrace.errors import HeadraceError
from headrace.live import Mailbox
from headrace.log import PAGE, decode_entries
from headrace.messages import ENDED, End, Event
from headrace.reader import Cursor, Reader

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0
_GONE = "The job's events are no longer stored."


class Following:
    """Iterates over batches of events: each has at least one, and the last one's last is the `End`.

    A plain iterator: a generator on each level would cost more than what is done for a token.
    """

    def __init__(
        self, redis_: redis.asyncio.Redis, reader: Reader, *, outage_s: float, leave: Callable[[], None]
    ) -> None:
        """`outage_s`: how long Redis may be away. `leave` is called once, and must not wait."""
        self._redis = redis_
        self._cursor = reader.cursor
        self._mailbox = reader.mailbox
        self._log = reader.keys.log(reader.job_id)
        self._job = reader.keys.job(reader.job_id)
        self._outage_s = outage_s
        self._leave: Callable[[], None] | None = leave

    def __aiter__(self) -> Following:
        return self

    async def __anext__(self) -> list[Event]:
        """Raises HeadraceError and RedisError, see `Follower.follow`."""
        while not self._cursor.ended:
            live = await self._mailbox.take()
            if live is None:
                events = await self._read()
            else:
                events = _splice(live, self._cursor, self._mailbox)
            if events:
                return events
        raise StopAsyncIteration

    async def aclose(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    async def _read(self) -> list[Event]:
        """What the log holds behind the cursor. Redis away is waited for."""
        delay_s, since_s = RETRY_FIRST_S, time.monotonic()
        while True:
            try:
                events = await self._read_once()
                break
            except (RedisError, OSError):
                if time.monotonic() - since_s > self._outage_s:
                    raise
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, RETRY_MOST_S)
        if len(events) >= PAGE:
            self._mailbox.mark_stale()
        return events

    async def _read_once(self) -> list[Event]:
        for _ in range(2):
            events = await self._page()
            if events:
                return events
            if not await self._is_behind():
                return []
        raise HeadraceError("lost", _GONE)

    async def _page(self) -> list[Event]:
        """Reads from the last event on, to see that it is still the one that was given out."""
        cursor = self._cursor
        start = f"{max(cursor.last, 1)}-0"
        stored = await self._redis.xrange(self._log, min=start, max="+", count=PAGE + 1)
        events = decode_entries(stored)
        if not events:
            return []
        if cursor.last > 0:
            if events[0].seq != cursor.last or (cursor.event is not None and events[0] != cursor.event):
                return _only_loss(events, cursor)
            events = events[1:]
        for event in events:
            if not cursor.take(event):
                return _only_loss(events, cursor)
        return events

    async def _is_behind(self) -> bool:
        """Nothing follows in the log: whether the job's state says that something should."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hmget(self._job, ["status", "seq"])
            pipeline.exists(self._log)
            (status, seq), stored = await pipeline.execute()
        return _judge((status or b"").decode(), int(seq or 0), bool(stored), self._cursor)


def _judge(status: str, seq: int, stored: bool, cursor: Cursor) -> bool:
    if not status and not stored:
        if cursor.seen:
            raise HeadraceError("lost", _GONE)
        return False
    cursor.seen = True
    if status in ENDED and cursor.last == seq:
        cursor.ended = True  # the caller had everything already
        return False
    if status in ENDED and cursor.last > seq:
        raise HeadraceError("invalid_request", f"after_seq must be at most {seq}.", "after_seq")
    if status and seq < cursor.last:
        raise HeadraceError("lost", "The server went back behind events that were already read.")
    return seq > cursor.last


def _only_loss(events: list[Event], cursor: Cursor) -> list[Event]:
    """The log does not go on where the reader is: the end that reports the loss is all that may follow."""
    end = events[-1]
    if isinstance(end, End) and end.error is not None and end.error.get("code") == "lost":
        cursor.jump(end)
        return [end]
    raise HeadraceError("lost", "Events are missing from the job's log.")


def _splice(live: list[Event], cursor: Cursor, mailbox: Mailbox) -> list[Event]:
    """The live events that go on where the reader is. A hole sends it to the log."""
    events: list[Event] = []
    for event in live:
        if event.seq <= cursor.last:
            continue
        if not cursor.take(event):
            mailbox.mark_stale()
            break
        events.append(event)
    return events
