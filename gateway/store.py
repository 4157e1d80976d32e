"""Jobs as the gateway sees them in Redis: submit, find, follow, cancel. Nothing is kept between calls."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.directory import Directory
from gateway.errors import job_error
from headrace.config import GatewaySettings
from headrace.errors import HeadraceError
from headrace.follow import Follower
from headrace.following import Following
from headrace.keys import Keys
from headrace.log import read_log
from headrace.lua_source import load_script
from headrace.messages import CLASSES, Event, Result
from headrace.scripts import Scripts

_ENTRY_ID = re.compile(r"\d{1,20}-\d{1,20}")
FieldValue = bytes | str | int | float
ESTIMATES = ("jobs", "late", "wrong")  # of `Depth.estimates`


@dataclass(frozen=True, slots=True)
class JobRef:
    pool: str
    id: str


@dataclass(frozen=True, slots=True)
class Found:
    """A job and its hash as text; it has at least `status`."""

    ref: JobRef
    fields: dict[str, str]

    @property
    def tenant(self) -> str:
        return self.fields.get("tenant", "default")


@dataclass(frozen=True, slots=True)
class NewJob:
    """A checked job, ready to submit. `fields` are those of the queue entry."""

    ref: JobRef
    job_class: str
    fields: Mapping[str, FieldValue]
    tenant: str = "default"
    idem_key: str | None = None
    body_hash: str = ""
    id_known: bool = False  # its producer chose the id, and may ask for it again


@dataclass(frozen=True, slots=True)
class Depth:
    """How full a pool is. `entries` counts queue entries by class, running ones too.

    `estimates`: jobs with a deadline, how many of them a strict one would have refused, how many wrongly.
    """

    entries: dict[str, int] = field(default_factory=dict)
    running: int = 0
    estimates: dict[str, int] = field(default_factory=dict)


class Store:
    """Everything raises RedisError when Redis does not answer within the client's timeout."""

    def __init__(
        self, redis: Redis, follower: Follower, directory: Directory, settings: GatewaySettings
    ) -> None:
        self._redis = redis
        self._follower = follower
        self._directory = directory
        self._settings = settings
        self._scripts: dict[str, Scripts] = {}

    @property
    def redis(self) -> Redis:
        return self._redis

    def scripts(self, pool: str) -> Scripts:
        if pool not in self._scripts:
            self._scripts[pool] = Scripts(self._redis, Keys(pool))
        return self._scripts[pool]

    async def submit(self, job: NewJob) -> JobRef:
        """Raises HeadraceError `conflict` or `overloaded`."""
        submitted = await self.scripts(job.ref.pool).submit(
            job.job_class,
            job.ref.id,
            job.fields,
            tenant=job.tenant,
            idem_key=job.idem_key,
            body_hash=job.body_hash,
            max_entries=self._settings.max_queue_entries,
            max_bytes=self._settings.max_queue_bytes,
        )
        self._follower.know(Keys(job.ref.pool), submitted.job_id)
        return JobRef(job.ref.pool, submitted.job_id)

    async def fork(self, job: NewJob, events: Sequence[Event], *, prompt_tokens: int) -> JobRef:
        """Submits a job that has said `events` already. Raises HeadraceError `conflict` or `overloaded`."""
        submitted = await self.scripts(job.ref.pool).fork(
            job.job_class,
            job.ref.id,
            job.fields,
            events,
            prompt_tokens=prompt_tokens,
            tenant=job.tenant,
            max_entries=self._settings.max_queue_entries,
            max_bytes=self._settings.max_queue_bytes,
        )
        return JobRef(job.ref.pool, submitted.job_id)

    async def log(self, ref: JobRef) -> list[Event]:
        return await read_log(self._redis, Keys(ref.pool), ref.id)

    async def find(self, job_id: str, pool: str | None = None) -> Found | None:
        """The job of that id in any pool; None when there is none, or no longer."""
        pools = [pool] if pool else list(await self._directory.pools())
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in pools:
                pipe.hgetall(Keys(name).job(job_id))
            hashes = await pipe.execute()
        for name, raw in zip(pools, hashes, strict=True):
            if b"status" in raw:
                return Found(JobRef(name, job_id), _text(raw))
        return await self._find_queued(job_id, pools)

    async def state(self, ref: JobRef) -> dict[str, str]:
        return _text(await self._redis.hgetall(Keys(ref.pool).job(ref.id)))  # type: ignore[misc]

    async def result(self, ref: JobRef) -> Result:
        """The stored result of a job that is done. Raises `lost` when it is not there."""
        state = await self.state(ref)
        if state.get("status") in ("failed", "cancelled"):
            raise job_error(_json(state.get("error")), state["status"])
        if "result" not in state:
            raise HeadraceError("lost", "The job's result is gone.")
        return msgspec.json.decode(state["result"], type=Result)

    def follow(self, ref: JobRef, after_seq: int = 0) -> Following:
        """The job's events after `after_seq`, what has come together in one list; the terminal one ends the
        last. Raises `lost` if Redis lost them. It must be closed."""
        return self._follower.follow_in_batches(Keys(ref.pool), ref.id, after_seq)

    async def followers(self, ref: JobRef) -> int:
        """How many gateways and clients follow the job at this moment."""
        ((_, count),) = await self._redis.pubsub_numsub(Keys(ref.pool).live(ref.id))
        return int(count)

    async def cancel(self, ref: JobRef) -> None:
        """A waiting job ends at once, a running one at its next step, an ended one is left as it is."""
        await self.scripts(ref.pool).cancel(ref.id, retention_ms=self._settings.retention_ms)

    async def entry(self, found: Found) -> dict[bytes, bytes]:
        """The job's queue entry, which is there until the job has ended; empty when there is none."""
        job_class, entry_id = found.fields.get("class", ""), found.fields.get("entry", "")
        if job_class not in CLASSES or not _ENTRY_ID.fullmatch(entry_id):
            return {}
        for _, fields in await self._redis.xrange(Keys(found.ref.pool).queue(job_class), entry_id, entry_id):
            return dict(fields)
        return {}

    async def entry_field(self, found: Found, name: str) -> str | None:
        value = (await self.entry(found)).get(name.encode())
        return value.decode(errors="replace") if value is not None else None

    async def reap(self, pool: str) -> int:
        """Ends what can never run; how many jobs that were."""
        return (await self.scripts(pool).reap(retention_ms=self._settings.retention_ms)).ended

    async def load_scripts(self) -> None:
        """Raises RedisError when the server cannot run the `submit` script."""
        await self._redis.script_load(load_script("submit").text)

    async def depth(self, pool: str) -> Depth:
        keys = Keys(pool)
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_class in CLASSES:
                pipe.xlen(keys.queue(job_class))
            pipe.zcard(keys.leases)
            pipe.hmget(keys.vtime, [f"shadow:{kind}" for kind in ESTIMATES])
            *entries, running, shadow = await pipe.execute()
        estimates = {kind: int(count or 0) for kind, count in zip(ESTIMATES, shadow, strict=True)}
        return Depth(dict(zip(CLASSES, entries, strict=True)), running, estimates)

    async def _find_queued(self, job_id: str, pools: list[str]) -> Found | None:
        """An entry that a producer added by itself has no hash until a worker has claimed it."""
        job_class, _, entry_id = job_id.partition("-")
        if job_class not in CLASSES or not _ENTRY_ID.fullmatch(entry_id):
            return None
        for pool in pools:
            for _, entry in await self._redis.xrange(Keys(pool).queue(job_class), entry_id, entry_id):
                tenant = entry.get(b"tenant", b"default").decode(errors="replace")
                state = {"status": "queued", "class": job_class, "entry": entry_id, "tenant": tenant}
                return Found(JobRef(pool, job_id), state)
        return None


def new_id(prefix: str) -> str:
    """An id that sorts by time: milliseconds, then randomness, as in a UUID of version 7."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def _json(text: str | None) -> Any:
    return msgspec.json.decode(text) if text else None


def _text(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in raw.items()}
