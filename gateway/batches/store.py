"""Batches in Redis. Each change is one script and made once, however many processes try it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis

from gateway.batches.schema import Batch, BatchError, BatchErrors, OpenJob, RequestCounts
from gateway.errors import HttpError
from gateway.lua import run_script
from headrace.keys import (
    BATCHES_DUE,
    batch_key,
    batch_open,
    file_data,
    tenant_batches,
    valid_job_id,
)

MAX_BATCHES = 200
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
DUE_PAGE = 50
_TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch as its hash says. `line` and `offset`: where its reading stands. Times in ms."""

    id: str
    tenant: str
    status: str
    fields: Mapping[str, str]

    def number(self, name: str) -> int:
        return int(self.fields.get(name) or 0)

    @property
    def output_id(self) -> str:
        return self.fields["output"]

    @property
    def error_id(self) -> str:
        return self.fields["error"]

    def shown(self) -> Batch:
        ended = self.status in ENDED
        errors = self.fields.get("errors")
        times = {name: self.number(name) // 1000 for name in _TIMES if name in self.fields}
        counts = {name: self.number(name) for name in ("total", "completed", "failed")}
        return Batch(
            id=self.id,
            endpoint=self.fields["endpoint"],
            errors=BatchErrors(data=msgspec.json.decode(errors, type=list[BatchError])) if errors else None,
            input_file_id=self.fields["input"],
            completion_window=self.fields["window"],
            status=self.status,
            output_file_id=self.output_id if ended and self.number("output_bytes") else None,
            error_file_id=self.error_id if ended and self.number("error_bytes") else None,
            created_at=self.number("created") // 1000,
            expires_at=self.number("expires") // 1000,
            request_counts=RequestCounts(**counts),
            metadata=msgspec.json.decode(self.fields["metadata"]) if "metadata" in self.fields else None,
            **times,  # type: ignore[arg-type]
        )


class Batches:
    """Raises RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def put(
        self, batch_id: str, tenant: str, fields: Mapping[str, Any], *, ttl_ms: int, window_ms: int
    ) -> None:
        """Raises HttpError 429 when the tenant has too many."""
        keys = [batch_key(batch_id), tenant_batches(tenant), BATCHES_DUE]
        flat = [part for pair in fields.items() for part in pair]
        reply = await run_script(
            self._redis, "batch_put", keys, [batch_id, ttl_ms, MAX_BATCHES, window_ms, *flat]
        )
        if reply[0] != b"ok":
            raise HttpError(429, f"At most {MAX_BATCHES} batches are kept.", code="rate_limited")

    async def find(self, batch_id: str) -> Stored | None:
        if not valid_job_id(batch_id):
            return None
        return _stored(batch_id, await self._redis.hgetall(batch_key(batch_id)))  # type: ignore[misc]

    async def listed(self, tenant: str) -> list[Stored]:
        """A tenant's batches, newest first."""
        ids = [i.decode() for i in await self._redis.zrange(tenant_batches(tenant), 0, -1)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for batch_id in ids:
                pipe.hgetall(batch_key(batch_id))
            found = [_stored(i, raw) for i, raw in zip(ids, await pipe.execute(), strict=True)]
        return sorted((batch for batch in found if batch), key=lambda batch: batch.id, reverse=True)

    async def due(self, lease_ms: int) -> list[str]:
        found = await run_script(self._redis, "due_take", [BATCHES_DUE], [DUE_PAGE, lease_ms])
        return [batch_id.decode() for batch_id in found]

    async def due_again(self, batch_id: str, at_ms: int) -> None:
        await self._redis.zadd(BATCHES_DUE, {batch_id: at_ms}, xx=True)

    async def drop_due(self, batch_id: str) -> None:
        await self._redis.zrem(BATCHES_DUE, batch_id)

    async def move(self, batch: Stored, status: str, **fields: Any) -> bool:
        """From the status it was read with. False: somebody else moved it."""
        flat = [part for pair in fields.items() for part in pair]
        args = [batch.id, batch.status, status, int(status in ENDED), *flat]
        return bool(await run_script(self._redis, "batch_move", [batch_key(batch.id), BATCHES_DUE], args))

    async def open_jobs(self, batch_id: str) -> dict[int, OpenJob]:
        raw = await self._redis.hgetall(batch_open(batch_id))  # type: ignore[misc]
        return {int(line): msgspec.json.decode(job, type=OpenJob) for line, job in raw.items()}

    async def opened(self, batch: Stored, line: int, offset: int, job: OpenJob) -> bool:
        return await self._went_on(batch, line, offset, "open", msgspec.json.encode(job))

    async def refused(self, batch: Stored, line: int, offset: int, answer: bytes) -> bool:
        return await self._went_on(batch, line, offset, "failed", answer)

    async def answered(
        self, batch: Stored, line: int, kind: Literal["completed", "failed"], answer: bytes
    ) -> bool:
        """Writes the answer of an open line into the output or the error file."""
        file_id = batch.output_id if kind == "completed" else batch.error_id
        keys = [batch_key(batch.id), batch_open(batch.id), file_data(file_id)]
        args = [line, kind, answer, len(answer), batch.number("ttl")]
        return bool(await run_script(self._redis, "batch_answer", keys, args))

    async def _went_on(self, batch: Stored, line: int, offset: int, kind: str, value: bytes) -> bool:
        keys = [batch_key(batch.id), batch_open(batch.id), file_data(batch.error_id)]
        args = [line, offset, kind, value, len(value), batch.number("ttl")]
        return bool(await run_script(self._redis, "batch_line", keys, args))


def _stored(batch_id: str, raw: Mapping[bytes, bytes]) -> Stored | None:
    if b"status" not in raw:
        return None
    fields = {name.decode(): value.decode(errors="replace") for name, value in raw.items()}
    return Stored(batch_id, fields["tenant"], fields["status"], fields)
