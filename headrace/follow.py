"""Following jobs: any number of them over one connection for what is said and a few for what was."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import redis.asyncio

from headrace.connect import connect
from headrace.following import Following
from headrace.keys import Keys
from headrace.live import LiveChannels
from headrace.messages import Event
from headrace.reader import Cursor, Reader
from headrace.silence import SilenceWatch

MAX_KNOWN = 65_536


class Follower:
    """Follows any number of jobs of any pools over one pub/sub connection and a few others.

    Close the iterator (`contextlib.aclosing`) when leaving early: it unsubscribes, and never waits for Redis.
    """

    def __init__(self, url: str, *, redis: redis.asyncio.Redis | None = None, outage_s: float = 30.0) -> None:
        """`redis`: a client for reading logs, not closed here. `outage_s`: how long Redis may be away."""
        self._channels = LiveChannels(url)
        self._redis = redis or connect(url, max_connections=8)
        self._silence = SilenceWatch(self._redis)
        self._owns_redis = redis is None
        self._outage_s = outage_s
        self._known: dict[str, None] = {}  # in order of arrival

    def know(self, keys: Keys, job_id: str) -> None:
        """The job was taken in: if the server knows nothing of it, it was lost, and is not waited for."""
        self._known[keys.job(job_id)] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    async def start(self) -> None:
        self._start()

    async def close(self) -> None:
        await self._silence.close()
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
        async with aclosing(self.follow_in_batches(keys, job_id, after_seq)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    def follow_in_batches(self, keys: Keys, job_id: str, after_seq: int = 0) -> Following:
        """As `follow`: what has come together, together. It must be closed."""
        self._start()
        cursor = Cursor(after_seq, keys.job(job_id) in self._known)
        reader = Reader(keys, job_id, cursor, self._channels.open(keys.live(job_id)))
        self._silence.add(reader)

        def leave() -> None:
            self._silence.discard(reader)
            self._channels.shut(keys.live(job_id), reader.mailbox)

        return Following(self._redis, reader, outage_s=self._outage_s, leave=leave)

    def _start(self) -> None:
        self._channels.start()
        self._silence.start()
