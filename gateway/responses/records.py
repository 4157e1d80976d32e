"""Stored responses: what was asked, with all that was said before, and, once it has ended, the answer.

A record outlives its job. The answer is copied into it by whoever sees the end first: the stream, the waiting
request, a later look-up, or the tasks process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.lua import run_script
from gateway.responses.render import response_of
from gateway.responses.schema import ResponseBody
from headrace.keys import Keys, valid_job_id

ENDED = ("completed", "incomplete", "failed", "cancelled")
PAGE = 200
GRACE_MS = 60_000  # a record is written before its job


@dataclass(frozen=True, slots=True)
class Record:
    """`context`: the messages that led to the answer, without instructions, which hold for one response."""

    pool: str
    tenant: str
    body: ResponseBody
    items: list[dict[str, Any]]
    context: list[dict[str, str]]
    settled: bool

    @property
    def id(self) -> str:
        return self.body.id

    def following(self) -> list[dict[str, str]]:
        """The messages before the next response's own."""
        return [*self.context, {"role": "assistant", "content": self.body.output[0].content[0].text}]


class Records:
    """Raises RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def put(self, record: Record, retention_ms: int) -> None:
        keys = Keys(record.pool)
        fields = {
            "tenant": record.tenant,
            "body": msgspec.json.encode(record.body),
            "items": msgspec.json.encode(record.items),
            "context": msgspec.json.encode(record.context),
        }
        flat = [part for pair in fields.items() for part in pair]
        call_keys = [keys.response(record.id), keys.open_responses]
        await run_script(self._redis, "response_put", call_keys, [record.id, retention_ms, *flat])

    async def find(self, response_id: str, pools: Sequence[str]) -> Record | None:
        """As it was stored; the state of a response that has not ended is its job's."""
        if not valid_job_id(response_id):
            return None
        async with self._redis.pipeline(transaction=False) as pipe:
            for pool in pools:
                pipe.hgetall(Keys(pool).response(response_id))
            hashes = await pipe.execute()
        for pool, raw in zip(pools, hashes, strict=True):
            if b"body" in raw:
                return _record(pool, raw)
        return None

    async def refreshed(self, record: Record) -> Record:
        """With the job's state; an end is kept in the record."""
        if record.settled:
            return record
        raw = await self._redis.hgetall(Keys(record.pool).job(record.id))  # type: ignore[misc]
        fields = {
            name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()
        }
        body = response_of(record.body, fields)
        settled = body.status in ENDED
        if settled:
            await self.settle(record.pool, body)
        return Record(record.pool, record.tenant, body, record.items, record.context, settled)

    async def settle(self, pool: str, body: ResponseBody) -> None:
        keys = Keys(pool)
        args = [body.id, msgspec.json.encode(body)]
        await run_script(self._redis, "response_settle", [keys.response(body.id), keys.open_responses], args)

    async def delete(self, pool: str, response_id: str) -> None:
        keys = Keys(pool)
        await run_script(
            self._redis, "response_delete", [keys.response(response_id), keys.open_responses], [response_id]
        )

    async def settle_ended(self, pool: str, now_ms: int) -> int:
        """Copies the answers of ended jobs into their records before the jobs expire; how many."""
        open_key, settled, start = Keys(pool).open_responses, 0, 0
        while True:
            page = await self._redis.zrangebyscore(open_key, "-inf", now_ms - GRACE_MS, start=start, num=PAGE)
            for raw_id in page:
                record = await self.find(raw_id.decode(), [pool])
                if record is None:
                    await self.delete(pool, raw_id.decode())
                done = record is None or (await self.refreshed(record)).settled
                settled, start = settled + done, start + (not done)
            if len(page) < PAGE:
                return settled


def _record(pool: str, raw: Mapping[bytes, bytes]) -> Record:
    return Record(
        pool,
        raw.get(b"tenant", b"default").decode(),
        msgspec.json.decode(raw.get(b"final") or raw[b"body"], type=ResponseBody),
        msgspec.json.decode(raw.get(b"items", b"[]"), type=list[dict[str, Any]]),
        msgspec.json.decode(raw.get(b"context", b"[]"), type=list[dict[str, str]]),
        b"final" in raw,
    )
