"""Readers that hear nothing: whether there is something for them all the same, asked for all of them at once.

A channel may lose messages without anybody noticing, and a job may be lost with its server. A timer and two
round trips a second for each waiting reader would cost a gateway with a thousand of them most of a core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from headrace.errors import HeadraceError
from headrace.log import decode_entries
from headrace.messages import ENDED
from headrace.reader import Cursor, Reader

SILENT_S = 1.0  # at most; at least half of it
PROBE_BATCH = 200


class SilenceWatch:
    """Sends a silent reader to the log when the log, or the job's state, is not as the reader last saw it."""

    def __init__(self, redis_: redis.asyncio.Redis) -> None:
        self._redis = redis_
        self._readers: set[Reader] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="silence-watch")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def add(self, reader: Reader) -> None:
        self._readers.add(reader)

    def discard(self, reader: Reader) -> None:
        self._readers.discard(reader)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SILENT_S / 2)
            silent = [reader for reader in self._readers if reader.mailbox.fell_silent()]
            silent.sort(key=_pool)
            for _, of_pool in groupby(silent, _pool):  # pools may be on different servers
                for batch in _batched(of_pool):
                    await self._probe(batch)

    async def _probe(self, silent: list[Reader]) -> None:
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                asked = [(reader, _ask(pipe, reader)) for reader in silent]
                replies = iter(await pipe.execute(raise_on_error=False))
        except (RedisError, OSError):
            for reader in silent:
                reader.mailbox.mark_stale()  # each of them waits for Redis as long as it may
            return
        for reader, asked_log in asked:
            state, stored = next(replies), next(replies) if asked_log else []
            if not _as_last_seen(reader.cursor, state, stored):
                reader.mailbox.mark_stale()


def _pool(reader: Reader) -> str:
    return reader.keys.pool


def _batched(readers: Iterator[Reader]) -> Iterator[list[Reader]]:
    while batch := list(islice(readers, PROBE_BATCH)):
        yield batch


def _ask(pipe: Pipeline, reader: Reader) -> bool:
    """Whether the log is asked for too: before the first event the job's state tells all."""
    pipe.hmget(reader.keys.job(reader.job_id), ["status", "seq"])
    last = reader.cursor.last
    if last > 0:
        pipe.xrange(reader.keys.log(reader.job_id), min=f"{last}-0", max="+", count=2)
    return last > 0


def _as_last_seen(cursor: Cursor, state: Any, stored: Any) -> bool:
    """False also for replies that are errors: what to make of them is the reader's affair."""
    try:
        events = decode_entries(stored)
        status, seq = (state[0] or b"").decode(), int(state[1] or 0)
    except (HeadraceError, TypeError, ValueError):
        return False
    if not status:
        return not cursor.seen
    if not cursor.seen or status in ENDED or seq != cursor.last:
        return False
    if not events:
        return True
    return len(events) == 1 and events[0].seq == cursor.last and cursor.event in (None, events[0])
