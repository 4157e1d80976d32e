"""The worker's card in Redis: that it lives, what it serves, how full it is. It expires with the worker."""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis

from headrace.keys import POOLS, Keys
from worker.engine.stats import EngineStats

CARD_TTL_MS = 10_000
REFRESH_S = 2.0


def card_numbers(stats: EngineStats) -> dict[str, str | int | float]:
    """The engine's state as a card shows it."""
    return {
        "step": stats.step,
        "running": stats.running,
        "waiting": stats.waiting,
        "slots_used": stats.slots_used,
        "slots": stats.max_num_seqs,
        "num_blocks": stats.num_blocks,
        "free_blocks": stats.free_blocks,
        "cached_blocks": stats.cached_blocks,
        "token_budget": stats.token_budget,
        "budget_reason": stats.budget_reason,
        "preemptions": stats.preemptions,
        "generated_tokens": stats.generated_tokens,
        "guessed_tokens": stats.guessed_tokens,
        "right_guesses": stats.right_guesses,
        "computed_tokens": stats.computed_tokens,
        "prefix_queried_tokens": stats.prefix_queried_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
    }


class Utilisation:
    """Sums over steps: used by total, between two readings of the card, is the utilisation meanwhile."""

    def __init__(self) -> None:
        self._step = -1
        self._sums = dict.fromkeys(
            ("slot_steps_used", "slot_steps_total", "kv_block_steps_used", "kv_block_steps_total"), 0
        )

    def add(self, stats: EngineStats) -> None:
        """Counts each step once. A slot is used by a sequence that the step computed."""
        if stats.step == self._step:
            return
        self._step = stats.step
        self._sums["slot_steps_used"] += stats.last_step_seqs
        self._sums["slot_steps_total"] += stats.max_num_seqs
        self._sums["kv_block_steps_used"] += stats.num_blocks - stats.free_blocks
        self._sums["kv_block_steps_total"] += stats.num_blocks

    def sums(self) -> dict[str, int]:
        return dict(self._sums)


class Card:
    """Writes and removes one worker's card. Raises RedisError as it comes."""

    def __init__(self, redis: Redis, keys: Keys, worker_id: str, fixed: Mapping[str, str | int]) -> None:
        self._redis = redis
        self._keys = keys
        self._worker_id = worker_id
        self._fixed = dict(fixed)

    async def write(self, changing: Mapping[str, str | int | float]) -> None:
        seconds, micros = await self._redis.time()
        expires_ms = int(seconds) * 1000 + int(micros) // 1000 + CARD_TTL_MS
        key = self._keys.worker(self._worker_id)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(key, mapping={**self._fixed, **changing})
            pipe.pexpire(key, CARD_TTL_MS)
            pipe.zadd(self._keys.workers, {self._worker_id: expires_ms})
            pipe.zremrangebyscore(self._keys.workers, "-inf", expires_ms - 10 * CARD_TTL_MS)
            await pipe.execute()
        await self._redis.sadd(POOLS, self._keys.pool)  # type: ignore[misc]  # on a cluster, elsewhere

    async def remove(self) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(self._keys.worker(self._worker_id))
            pipe.zrem(self._keys.workers, self._worker_id)
            await pipe.execute()
