"""Where a queued job stands at this moment, and when it may start: what `submit` foretold, told anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redis.asyncio import Redis

from gateway.jobschema import JobState
from gateway.store import Found
from headrace.keys import Keys
from headrace.messages import CLASSES

SHARES = {"high": 16, "normal": 4, "low": 1}  # between classes that wait, as in the order of service
LEAST_PACE_MS = 100


@dataclass(frozen=True, slots=True)
class Queues:
    """What waits in a pool. `costs` by class, in tokens as fair sharing counts them; `pace` in those a ms."""

    counts: Mapping[str, int]
    costs: Mapping[str, float]
    pace: float  # 0: not known

    def cost_before(self, job_class: str, entries: int) -> float:
        """Of so many entries of that class."""
        count = self.counts[job_class]
        return entries * self.costs[job_class] / count if count else 0.0

    def wait_ms(self, job_class: str, cost: float) -> float | None:
        """How long so much of that class takes; None when the pace is not known."""
        if cost == 0:
            return 0.0
        if self.pace == 0:
            return None
        waiting = sum(share for name, share in SHARES.items() if self.counts[name] or name == job_class)
        own_pace = self.pace * SHARES[job_class] / waiting
        return min(cost / own_pace, sum(self.costs.values()) / self.pace)


class Waiting:
    """Tells a queued job's place. Raises RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def describe(self, found: Found, state: JobState) -> None:
        """Sets `position` within the job's class, `ahead_tokens` and, when the pace is known, `eta_ms`."""
        keys, job_class = Keys(found.ref.pool), found.fields.get("class", "")
        entry_id = found.fields.get("entry", "")
        if job_class not in CLASSES or not entry_id:
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zrank(keys.ready(job_class), entry_id)
            pipe.zscore(keys.leases, f"{job_class}-{entry_id}")
            for name in CLASSES:
                pipe.zcard(keys.ready(name))
            pipe.hmget(keys.vtime, ["pace:cost", "pace:ms", *(f"b:{name}" for name in CLASSES)])
            rank, lease, *counts, clocks = await pipe.execute()
        if lease is not None:
            return  # somebody is about to begin
        queues = _queues(dict(zip(CLASSES, counts, strict=True)), clocks)
        # An entry that is not sorted yet goes behind those that are, at the latest.
        ahead = queues.counts[job_class] if rank is None else rank
        cost = queues.cost_before(job_class, ahead)
        wait_ms = queues.wait_ms(job_class, cost)
        state.position, state.ahead_tokens = ahead + 1, round(cost)
        state.eta_ms = None if wait_ms is None else round(wait_ms)


def _queues(counts: dict[str, int], clocks: list[bytes | None]) -> Queues:
    pace_cost, pace_ms, *costs = (_number(value) for value in clocks)
    pace = pace_cost / pace_ms if pace_ms >= LEAST_PACE_MS else 0.0
    return Queues(counts, dict(zip(CLASSES, costs, strict=True)), pace)


def _number(value: bytes | None) -> float:
    try:
        return max(0.0, float(value or 0))
    except ValueError:
        return 0.0
