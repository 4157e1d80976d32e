"""Webhooks in Redis: from the note of an end to a delivery, its attempts, its audit record, its replay."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis

from gateway.jobschema import job_state
from gateway.lua import run_script
from gateway.store import JobRef
from headrace.keys import Keys

MAX_LISTED = 10_000
MAX_HISTORY = 20
MAX_BODY_BYTES = 65_536
PAGE = 100
_NUMBERS = ("attempts", "replays", "created", "updated", "next")
Status = Literal["pending", "delivered", "failed"]


class Attempt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`at` in ms of Redis's clock; `code` is the HTTP status, `error` what went wrong."""

    at: int
    took_ms: int
    code: int | None = None
    error: str | None = None


class Delivery(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One webhook. Its id is the same in every attempt, and in replays."""

    id: str
    object: str = msgspec.field(default_factory=lambda: "webhook.delivery")
    pool: str
    job: str
    tenant: str
    url: str
    status: str
    attempts: int = 0
    replays: int = 0
    created: int = 0
    updated: int | None = None
    next: int | None = None
    history: list[Attempt] = []


class Deliveries:
    """The deliveries of one pool."""

    def __init__(self, redis: Redis, pool: str, *, retention_ms: int) -> None:
        self._redis = redis
        self._pool = pool
        self._keys = Keys(pool)
        self._retention_ms = retention_ms

    async def take_notes(self) -> int:
        """Makes deliveries of ends that were noted; how many. Any number of processes may do so at once."""
        notes = await self._redis.xrange(self._keys.hooks, count=PAGE)
        for entry_id, raw in notes:
            await self._take(entry_id.decode(), _text(raw or {}))
        return len(notes)

    async def due(self, lease_ms: int) -> list[str]:
        """Ids that are due, each handed out once within `lease_ms`."""
        return [
            i.decode() for i in await run_script(self._redis, "due_take", [self._keys.due], [PAGE, lease_ms])
        ]

    async def read(self, delivery_id: str) -> tuple[Delivery, str] | None:
        """The record and the body that is sent."""
        raw = _text(await self._redis.hgetall(self._keys.delivery(delivery_id)))  # type: ignore[misc]
        return (_delivery(self._pool, delivery_id, raw), raw.get("body", "")) if "status" in raw else None

    async def settle(
        self, delivery: Delivery, status: Status, delay_s: float, *, took_ms: int, **outcome: Any
    ) -> bool:
        """Writes an attempt down. False: another attempt was written down meanwhile, and this one is not."""
        keys = self._keys
        note = msgspec.json.encode({"took_ms": took_ms, **outcome})[1:]
        args = [delivery.id, delivery.attempts, status, round(delay_s * 1000), note, MAX_HISTORY]
        reply = await run_script(self._redis, "hook_settle", [keys.delivery(delivery.id), keys.due], args)
        return bool(reply == b"ok")

    async def postpone(self, delivery_id: str, until_ms: int) -> None:
        await self._redis.zadd(self._keys.due, {delivery_id: until_ms}, xx=True)

    async def replay(self, delivery_id: str) -> bool:
        keys = [self._keys.delivery(delivery_id), self._keys.due]
        reply = await run_script(self._redis, "hook_replay", keys, [delivery_id, self._retention_ms])
        return bool(reply == b"ok")

    async def listed(self, tenant: str, before_ms: int | None, limit: int) -> list[Delivery]:
        """A tenant's deliveries, newest first, made before `before_ms`."""
        key, top = self._keys.deliveries(tenant), "+inf" if before_ms is None else f"({before_ms}"
        ids = [i.decode() for i in await self._redis.zrevrangebyscore(key, top, "-inf", start=0, num=limit)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for delivery_id in ids:
                pipe.hgetall(self._keys.delivery(delivery_id))
            found = zip(ids, map(_text, await pipe.execute()), strict=True)
        return [_delivery(self._pool, i, raw) for i, raw in found if "status" in raw]

    async def _take(self, entry_id: str, note: Mapping[str, str]) -> None:
        job, tenant, url = note.get("job", ""), note.get("tenant", "default"), note.get("url", "")
        delivery_id = (
            "msg_" + hashlib.blake2b(f"{self._pool} {job} {entry_id}".encode(), digest_size=12).hexdigest()
        )
        state = _text(await self._redis.hgetall(self._keys.job(job)))  # type: ignore[misc]
        body = event_body(JobRef(self._pool, job), {**note, **state}, int(note.get("at") or 0))
        keys = self._keys
        call_keys = [keys.hooks, keys.delivery(delivery_id), keys.deliveries(tenant), keys.due]
        fields = ["job", job, "tenant", tenant, "url", url, "body", body]
        await run_script(
            self._redis,
            "hook_take",
            call_keys,
            [entry_id, delivery_id, self._retention_ms, MAX_LISTED, *fields],
        )


def event_body(ref: JobRef, fields: Mapping[str, str], at_ms: int) -> bytes:
    """The JSON that is sent. A result too large for it is left out: the job's state still has it."""
    state = job_state(ref, fields)
    when = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat().replace("+00:00", "Z")
    event = {"type": f"job.{state.status}", "timestamp": when, "data": state}
    body = msgspec.json.encode(event)
    if len(body) > MAX_BODY_BYTES:
        state.result = state.meta = None
        body = msgspec.json.encode({**event, "truncated": True})
    return body


def _delivery(pool: str, delivery_id: str, raw: Mapping[str, str]) -> Delivery:
    history = [msgspec.json.decode(line, type=Attempt) for line in raw.get("history", "").splitlines()]
    numbers = {name: int(raw[name]) for name in _NUMBERS if name in raw}
    texts = {name: raw.get(name, "") for name in ("job", "tenant", "url", "status")}
    return Delivery(id=delivery_id, pool=pool, history=history, **texts, **numbers)  # type: ignore[arg-type]


def _text(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
