"""What `reap` is told of: entries past their deadline, and job hashes that a scan finds unended or no job."""

from __future__ import annotations

from dataclasses import dataclass, field

import redis.asyncio

from headrace.keys import Keys, valid_job_id
from headrace.messages import CLASSES

SCAN_COUNT = 1000
Found = tuple[str, str, str]  # class, entry id, job id


@dataclass(frozen=True, slots=True)
class Scanned:
    doubtful: list[Found] = field(default_factory=list)  # jobs that have not ended
    strays: list[str] = field(default_factory=list)  # keys of hashes that are no job


async def past_deadline(redis: redis.asyncio.Redis, keys: Keys, limit: int) -> list[Found]:
    """At most `limit` entries, the most overdue first."""
    seconds, micros = await redis.time()
    now_ms = seconds * 1000 + micros // 1000
    members = await redis.zrangebyscore(keys.deadlines, "-inf", now_ms, start=0, num=limit)
    if not members:
        return []
    own = await redis.hmget(keys.ids, members)  # type: ignore[misc]
    found = []
    for member, own_id in zip(members, own, strict=True):
        job_class, _, entry_id = member.decode("utf-8", "replace").partition("-")
        job_id = (own_id or member).decode("utf-8", "replace")
        if job_class in CLASSES and valid_job_id(job_id):
            found.append((job_class, entry_id, job_id))
    return found


class JobScan:
    """Goes round the job hashes of a pool, a few at each call."""

    def __init__(self, redis: redis.asyncio.Redis, keys: Keys) -> None:
        self._redis = redis
        self._prefix = keys.job("")
        self._cursor = 0

    async def next(self) -> Scanned:
        pattern = f"{self._prefix}*"
        self._cursor, names = await self._redis.scan(self._cursor, match=pattern, count=SCAN_COUNT)
        scanned = Scanned()
        if not names:
            return scanned
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hmget(name, ["status", "class", "entry"])
            states = await pipeline.execute(raise_on_error=False)
        for raw, state in zip(names, states, strict=True):
            name = raw.decode("utf-8", "replace")
            status, job_class, entry = ([b"?"] * 3) if isinstance(state, Exception) else state
            if status is None:
                scanned.strays.append(name)
            elif status in (b"queued", b"running") and job_class and entry and job_class.decode() in CLASSES:
                job_id = name.removeprefix(self._prefix)
                scanned.doubtful.append((job_class.decode(), entry.decode(), job_id))
        return scanned
