"""Which pools exist, what they serve and which workers live: from the workers' cards, kept for a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.exceptions import RedisError

from headrace.errors import HeadraceError
from headrace.keys import POOLS, Keys, valid_pool

FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool as its workers describe it. `cards` are those of live workers, by worker id."""

    name: str
    cards: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def models(self) -> frozenset[str]:
        served = {card.get("model", "") for card in self.cards.values()}
        aliases = {name for card in self.cards.values() for name in card.get("aliases", "").split(",")}
        return frozenset((served | aliases | {self.name}) - {""})

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint all workers agree on; None when there is none to name."""
        prints = {card.get("fingerprint", "") for card in self.cards.values()}
        return prints.pop() or None if len(prints) == 1 else None


class Directory:
    """Answers from a copy at most `FRESH_S` old, so that routing costs Redis nothing under load."""

    def __init__(self, redis: Redis, default_pool: str) -> None:
        self._redis = redis
        self._default = default_pool
        self._pools: dict[str, Pool] = {}
        self._asked_at_s = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None  # a reference, so that it is not collected

    async def pools(self, *, fresh: bool = False) -> dict[str, Pool]:
        """All known pools by name, the gateway's own among them. Raises RedisError."""
        if fresh or time.monotonic() - self._asked_at_s > FRESH_S or not self._pools:
            await self._refresh()
        return self._pools

    async def route(self, model: str | None) -> Pool:
        """The pool that serves `model`, by a worker's name for it or the pool's. Raises `unknown_model`.

        An old copy is good enough and renewed meanwhile, so that this does not wait for Redis.
        """
        pools = self._pools or await self.pools()
        if time.monotonic() - self._asked_at_s > FRESH_S:
            self._refresh_meanwhile()
        found = _serving(pools, model, self._default)
        if found is None:
            pools = await self.pools(fresh=True)
            found = _serving(pools, model, self._default)
        if found is None:
            known = ", ".join(sorted(model_names(pools.values())))
            message = f"No pool serves {(model or '')[:128]!r}. Known models: {known}."
            raise HeadraceError("unknown_model", message, "model")
        return found

    def _refresh_meanwhile(self) -> None:
        async def refresh() -> None:
            with suppress(RedisError, OSError):
                await self._refresh()

        self._asked_at_s = time.monotonic()
        self._refreshing = asyncio.get_running_loop().create_task(refresh())

    async def _refresh(self) -> None:
        self._asked_at_s = time.monotonic()
        self._pools = await self._read()

    async def _read(self) -> dict[str, Pool]:
        names = {name.decode(errors="replace") for name in await self._redis.smembers(POOLS)}  # type: ignore[misc]
        ordered = [self._default, *sorted(name for name in names - {self._default} if valid_pool(name))]
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in ordered:
                pipe.zrange(Keys(name).workers, 0, -1)
            members = await pipe.execute()
        return {name: await self._read_pool(name, ids) for name, ids in zip(ordered, members, strict=True)}

    async def _read_pool(self, name: str, worker_ids: list[bytes]) -> Pool:
        keys = Keys(name)
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker_id in worker_ids:
                pipe.hgetall(keys.worker(worker_id.decode()))
            hashes = await pipe.execute()
        live = zip(worker_ids, hashes, strict=True)
        return Pool(name, {worker_id.decode(): _text(card) for worker_id, card in live if card})


def _serving(pools: dict[str, Pool], model: str | None, default: str) -> Pool | None:
    """By pool name first, then the pool with the most workers that call their model so."""
    if model is None or model in pools:
        return pools[model or default]
    serving = [pool for pool in pools.values() if model in pool.models]
    return max(serving, key=lambda pool: (len(pool.cards), pool.name == default, pool.name), default=None)


def model_names(pools: Iterable[Pool]) -> set[str]:
    return {name for pool in pools for name in pool.models}


def _text(card: dict[bytes, bytes]) -> dict[str, str]:
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in card.items()}
