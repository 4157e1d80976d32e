"""Keys and policies as the gateway uses them: asked of Redis every two seconds, so revoked as soon."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from redis.asyncio import Redis

from gateway.pulse import Pulse
from headrace.tenants import Policy, StoredKey, Taken, TenantStore, key_id_of
from headrace.usage import UsageTotals, usage_of

FRESH_S = 2.0
WEIGHT_FRESH_S = 60.0
MAX_REMEMBERED = 4096
MAX_SHOWN = 200
K = TypeVar("K")
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """Answers that are young enough to be given again; bounded."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._known: dict[K, tuple[float, V]] = {}

    async def get(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        now_s = time.monotonic()
        known = self._known.get(key)
        if known is not None and now_s - known[0] < self._fresh_s:
            return known[1]
        value = await ask()
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[key] = (now_s, value)
        return value


class Tenants:
    """Raises RedisError as soon as Redis is known not to answer."""

    def __init__(self, redis: Redis, pulse: Pulse) -> None:
        self._redis = redis
        self._store = TenantStore(redis)
        self._pulse = pulse
        self._keys: _Recent[str, StoredKey | None] = _Recent(FRESH_S)
        self._policies: _Recent[str, Policy] = _Recent(FRESH_S)
        self._any: _Recent[str, bool] = _Recent(FRESH_S)
        self._spent: _Recent[str, int] = _Recent(FRESH_S)
        self._weights: _Recent[tuple[str, str, float], None] = _Recent(WEIGHT_FRESH_S)

    async def any_keys(self) -> bool:
        return await self._any.get("", lambda: self._pulse.guard(self._store.any_keys()))

    async def key(self, secret: str) -> StoredKey | None:
        """The stored key that `secret` is, unless it has been revoked."""
        key_id = key_id_of(secret)
        if key_id is None:
            return None
        found = await self._keys.get(key_id, lambda: self._pulse.guard(self._store.key(key_id)))
        return found if found is not None and found.is_of(secret) and not found.revoked_ms else None

    async def policy(self, tenant: str) -> Policy:
        return await self._policies.get(tenant, lambda: self._pulse.guard(self._store.policy(tenant)))

    async def spent(self, tenant: str, pools: Sequence[str]) -> int:
        """Tokens of this month, of jobs that have ended."""

        async def ask() -> int:
            return (await self.usage(tenant, pools)).total

        return await self._spent.get(tenant, ask)

    async def usage(self, tenant: str, pools: Sequence[str], month: str | None = None) -> UsageTotals:
        return await self._pulse.guard(usage_of(self._redis, pools, tenant, month))

    async def used_by_all(self, pools: Sequence[str]) -> dict[str, UsageTotals]:
        """This month's use of every tenant that has a key, of the first `MAX_SHOWN` by name."""
        names = sorted({key.tenant for key in await self._store.keys()})[:MAX_SHOWN]
        return {name: await usage_of(self._redis, pools, name) for name in names}

    async def take(self, tenant: str, policy: Policy, *, requests: int, tokens: int) -> Taken:
        return await self._pulse.guard(self._store.take(tenant, policy, requests=requests, tokens=tokens))

    async def tell_weight(self, pool: str, tenant: str, weight: float) -> None:
        """A pool may be younger than the tenant's policy, or have lost its clocks."""
        key = (pool, tenant, weight)
        await self._weights.get(key, lambda: self._pulse.guard(self._store.set_weight(pool, tenant, weight)))
