"""Hints that arrive between polls: a new entry (stream), a cancel, a drain, a job given back (channel)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from headrace.connect import retry_pause_s
from headrace.keys import Keys

log = structlog.get_logger("headrace.control")

BLOCK_MS = 1_250  # also how soon an idle worker looks for expired leases, and how often it is heard from
LOOKS_A_LEASE = 4  # at least
RETRY_MOST_S = 1.0


class EntryWatcher:
    """Blocks on the queues without reading from them: a wake-up can be lost, an entry cannot.

    `watch` waits for an id above `last_ids`; claiming is the `pick` script's matter alone.
    """

    def __init__(self, redis: Redis, keys: Keys, *, lease_ms: int) -> None:
        self._redis = redis
        self._keys = keys
        self._block_ms = min(BLOCK_MS, lease_ms // LOOKS_A_LEASE)
        self._failures = 0

    async def wait(self, last_ids: Mapping[str, str]) -> bool:
        """True when a queue has an entry above its id in `last_ids`, False in time for a look or an error."""
        streams = {self._keys.queue(job_class): last_id for job_class, last_id in last_ids.items()}
        try:
            found = bool(await self._redis.xread(streams, count=1, block=self._block_ms))  # type: ignore[arg-type]
        except (RedisError, OSError):
            self._failures += 1
            # The claim that follows reports what is wrong.
            await asyncio.sleep(retry_pause_s(self._failures, RETRY_MOST_S))
            return False
        self._failures = 0
        return found


class ControlChannel:
    """Listens to the pool's `ctl` channel. A lost message costs time only: flags in Redis are the truth."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        *,
        worker_id: str,
        on_cancel: Callable[[str], None],
        on_ready: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._worker_id = worker_id
        self._on_cancel = on_cancel
        self._on_ready = on_ready
        self._on_drain = on_drain
        self._failures = 0

    async def run(self) -> None:
        while True:
            try:
                await self._listen()
            except (RedisError, OSError):
                self._failures += 1
                await asyncio.sleep(retry_pause_s(self._failures, RETRY_MOST_S))

    async def _listen(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(self._keys.ctl)
            self._failures = 0
            while True:
                message = await pubsub.get_message(timeout=None)
                if message is not None:
                    self._handle(bytes(message["data"]))

    def _handle(self, data: bytes) -> None:
        words = data.decode("utf-8", "replace").split()
        match words:
            case ["cancel", job_id]:
                self._on_cancel(job_id)
            case ["ready"]:
                self._on_ready()
            case ["drain", worker_id] if worker_id in (self._worker_id, "*"):
                self._on_drain()
            case _:
                log.info("control_message_ignored", size_bytes=len(data))
