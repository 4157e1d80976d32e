"""Following a job: its log up to now, then the live channel, and the log again wherever that has a hole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from headrace.connect import connect
from headrace.errors import HeadraceError
from headrace.keys import Keys
from headrace.live import LiveChannels, Mailbox
from headrace.log import PAGE, decode_entries, decode_live
from headrace.messages import ENDED, End, Event

SILENT_S = 1.0
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0
MAX_KNOWN = 65_536
_GONE = "The job's events are no longer stored."


class _Cursor:
    """Where one reader is. `last` is the seq it has; `event` that very event, if it was read here."""

    def __init__(self, after_seq: int, known: bool) -> None:
        self.last = after_seq
        self.event: Event | None = None
        self.seen = known or after_seq > 0  # whether the job is known to have existed
        self.ended = False

    def take(self, event: Event) -> bool:
        """Goes on to `event` if it is the next. False: it is a repetition or there is a hole before it."""
        if event.seq != self.last + 1:
            return False
        self._move_to(event)
        return True

    def jump(self, event: End) -> None:
        self._move_to(event)

    def _move_to(self, event: Event) -> None:
        self.last, self.event, self.seen = event.seq, event, True
        self.ended = isinstance(event, End)


class Follower:
    """Follows any number of jobs of any pools over one pub/sub connection and a few others.

    Close the iterator (`contextlib.aclosing`) when leaving early: it unsubscribes, and never waits for Redis.
    """

    def __init__(self, url: str, *, redis: redis.asyncio.Redis | None = None, outage_s: float = 30.0) -> None:
        """`redis`: a client for reading logs, not closed here. `outage_s`: how long Redis may be away."""
        self._channels = LiveChannels(url)
        self._redis = redis or connect(url, max_connections=8)
        self._owns_redis = redis is None
        self._outage_s = outage_s
        self._known: dict[str, None] = {}  # in order of arrival

    def know(self, keys: Keys, job_id: str) -> None:
        """The job was taken in: if the server knows nothing of it, it was lost, and is not waited for."""
        self._known[keys.job(job_id)] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    async def start(self) -> None:
        self._channels.start()

    async def close(self) -> None:
        await self._channels.close()
        if self._owns_redis:
            await self._redis.aclose()

    async def __aenter__(self) -> Follower:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def follow(self, keys: Keys, job_id: str, after_seq: int = 0) -> AsyncGenerator[Event, None]:
        """Every event after `after_seq`, once and in order, up to the `End`; also of a job not yet known.

        Raises HeadraceError `lost` when events the job had are gone, `invalid_request` when `after_seq` is
        beyond its end, and RedisError when Redis is away for longer than `outage_s`.
        """
        self._channels.start()
        channel, cursor = keys.live(job_id), _Cursor(after_seq, keys.job(job_id) in self._known)
        mailbox = self._channels.open(channel)
        try:
            while not cursor.ended:
                messages = await mailbox.take(SILENT_S)
                if messages is None:
                    events = await self._read(keys, job_id, cursor, mailbox)
                else:
                    events = _splice(messages, cursor, mailbox)
                for event in events:
                    yield event
        finally:
            self._channels.shut(channel, mailbox)

    async def _read(self, keys: Keys, job_id: str, cursor: _Cursor, mailbox: Mailbox) -> list[Event]:
        """What the log holds behind the cursor. Redis away is waited for."""
        delay_s, since_s = RETRY_FIRST_S, time.monotonic()
        while True:
            try:
                events = await self._read_once(keys, job_id, cursor)
                break
            except (RedisError, OSError):
                if time.monotonic() - since_s > self._outage_s:
                    raise
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, RETRY_MOST_S)
        if len(events) >= PAGE:
            mailbox.mark_stale()
        return events

    async def _read_once(self, keys: Keys, job_id: str, cursor: _Cursor) -> list[Event]:
        for _ in range(2):
            events = await self._page(keys, job_id, cursor)
            if events:
                return events
            if not await self._is_behind(keys, job_id, cursor):
                return []
        raise HeadraceError("lost", _GONE)

    async def _page(self, keys: Keys, job_id: str, cursor: _Cursor) -> list[Event]:
        """Reads from the last event on, to see that it is still the one that was given out."""
        start = f"{max(cursor.last, 1)}-0"
        stored = await self._redis.xrange(keys.log(job_id), min=start, max="+", count=PAGE + 1)
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

    async def _is_behind(self, keys: Keys, job_id: str, cursor: _Cursor) -> bool:
        """Nothing follows in the log: whether the job's state says that something should."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hmget(keys.job(job_id), ["status", "seq"])
            pipeline.exists(keys.log(job_id))
            (status, seq), stored = await pipeline.execute()
        return _judge((status or b"").decode(), int(seq or 0), bool(stored), cursor)


def _judge(status: str, seq: int, stored: bool, cursor: _Cursor) -> bool:
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


def _only_loss(events: list[Event], cursor: _Cursor) -> list[Event]:
    """The log does not go on where the reader is: the end that reports the loss is all that may follow."""
    end = events[-1]
    if isinstance(end, End) and end.error is not None and end.error.get("code") == "lost":
        cursor.jump(end)
        return [end]
    raise HeadraceError("lost", "Events are missing from the job's log.")


def _splice(messages: list[bytes], cursor: _Cursor, mailbox: Mailbox) -> list[Event]:
    """The messages that go on where the reader is. A hole, or what is no event, sends it to the log."""
    events: list[Event] = []
    for message in messages:
        event = _decode(message)
        if event is not None and event.seq <= cursor.last:
            continue
        if event is None or not cursor.take(event):
            mailbox.mark_stale()
            break
        events.append(event)
    return events


def _decode(message: Any) -> Event | None:
    try:
        return decode_live(message)
    except (msgspec.DecodeError, TypeError):
        return None
