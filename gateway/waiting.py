"""Where a queued job stands and when it may start: estimates, from the order of service and the pace."""

from __future__ import annotations

import time
from dataclasses import dataclass

from redis.asyncio import Redis

from gateway.directory import Directory, Pool
from gateway.jobschema import JobState
from gateway.store import Found
from gateway.tenants import Tenants
from headrace.keys import Keys
from headrace.messages import CLASSES
from headrace.script_types import FairShare

SMOOTHING = 0.3  # weight of a new reading of a pool's pace
LEAST_INTERVAL_S = 1.0
MAX_POOLS = 256


@dataclass(slots=True)
class _Reading:
    at_s: float
    tokens: dict[str, int]  # by worker: generated since its start
    per_s: float = 0.0


class Pace:
    """Tokens a second that a pool generates while it is busy, from the counters on its workers' cards."""

    def __init__(self) -> None:
        self._last: dict[str, _Reading] = {}

    def read(self, pool: Pool, now_s: float) -> float:
        """Takes the cards as they are now; 0 while nothing is known."""
        tokens = {name: _number(card.get("generated_tokens")) for name, card in pool.cards.items()}
        last = self._last.get(pool.name)
        if last is None:
            if len(self._last) >= MAX_POOLS:
                self._last.clear()
            self._last[pool.name] = _Reading(now_s, tokens)
            return 0.0
        gained = sum(max(count - last.tokens.get(name, count), 0) for name, count in tokens.items())
        if gained and now_s - last.at_s >= LEAST_INTERVAL_S:
            seen = gained / (now_s - last.at_s)
            last.per_s = seen if not last.per_s else last.per_s + SMOOTHING * (seen - last.per_s)
            last.at_s, last.tokens = now_s, tokens
        elif not gained:
            last.at_s = now_s  # an idle pool is not a slow one
        return last.per_s


class Waiting:
    """Tells a queued job's place. Raises RedisError."""

    def __init__(self, redis: Redis, directory: Directory, tenants: Tenants) -> None:
        self._redis = redis
        self._directory = directory
        self._tenants = tenants
        self._pace = Pace()

    async def describe(self, found: Found, state: JobState) -> None:
        """Sets `position`, `ahead_tokens` and, when the pool's pace is known, `eta_ms`."""
        ahead = await self.ahead(found)
        if ahead is None:
            return
        tokens_a_job = await self._tokens_a_job(found)
        state.position, state.ahead_tokens = ahead + 1, ahead * tokens_a_job
        pool = (await self._directory.pools()).get(found.ref.pool)
        per_s = self._pace.read(pool, time.monotonic()) if pool is not None else 0.0
        if per_s > 0:
            state.eta_ms = round(state.ahead_tokens / per_s * 1000)

    async def ahead(self, found: Found) -> int | None:
        """Jobs that are served before: earlier ones of its class, all of higher ones. None: it has begun."""
        keys, job_class = Keys(found.ref.pool), found.fields.get("class", "")
        entry_id = found.fields.get("entry", "")
        if job_class not in CLASSES or not entry_id:
            return None
        higher = CLASSES[: CLASSES.index(job_class)]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zrank(keys.ready(job_class), entry_id)
            pipe.zscore(keys.leases, f"{job_class}-{entry_id}")
            for name in (job_class, *higher):
                pipe.zcard(keys.ready(name))
            rank, lease, waiting, *above = await pipe.execute()
        if lease is not None:
            return None
        # An entry that is not sorted yet goes behind those that are, at the latest.
        return int(sum(above) + (waiting if rank is None else rank))

    async def _tokens_a_job(self, found: Found) -> int:
        """What the tenant's jobs have generated on average this month."""
        jobs, output = await self._tenants.mean_output(found.fields.get("tenant", "default"), found.ref.pool)
        return max(1, output // jobs) if jobs else FairShare().default_output


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
