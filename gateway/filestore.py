"""Files in Redis: content in pieces, bounded for each file and each tenant, all of it with an expiry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.errors import HttpError
from gateway.lua import run_script
from gateway.store import new_id
from headrace.errors import HeadraceError
from headrace.keys import file_data, file_key, tenant_bytes, tenant_files, valid_job_id

PIECE_BYTES = 262_144
READ_BYTES = 1_048_576
MAX_PIECES = 1024
MAX_FILES = 1000
UPLOAD_TTL_MS = 600_000  # of pieces whose upload was never completed
MAX_NAME = 255


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class StoredFile(msgspec.Struct, kw_only=True, frozen=True):
    tenant: str
    shown: FileObject


class Files:
    """Raises RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def upload(self, pieces: AsyncIterator[bytes], max_bytes: int) -> tuple[str, int]:
        """Stores content that nobody can see until `commit`; its id and size. Raises `too_large`."""
        file_id, size = new_id("file-"), 0
        async for piece in pieces:
            size += len(piece)
            if size > max_bytes:
                await self._redis.delete(file_data(file_id))
                raise HeadraceError("too_large", f"A file may have {max_bytes} bytes.", "file")
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.rpush(file_data(file_id), piece)
                pipe.pexpire(file_data(file_id), UPLOAD_TTL_MS)
                await pipe.execute()
        return file_id, size

    async def commit(
        self, tenant: str, file: FileObject, *, ttl_ms: int, max_tenant_bytes: int
    ) -> StoredFile:
        """Raises HttpError 413 when the tenant has too many files, or too much in them."""
        fields = {
            "tenant": tenant,
            "created_at": file.created_at,
            "filename": file.filename[:MAX_NAME],
            "purpose": file.purpose,
        }
        flat = [part for pair in fields.items() for part in pair]
        args = [file.id, file.bytes, ttl_ms, MAX_FILES, max_tenant_bytes, *flat]
        reply = (await run_script(self._redis, "file_commit", _keys(tenant, file.id), args)).decode()
        if reply != "ok":
            await self._redis.delete(file_data(file.id))
            raise HttpError(413, f"The tenant's files have reached their limit of {reply}.", code="too_large")
        return await self.find(file.id) or StoredFile(tenant=tenant, shown=file)

    async def find(self, file_id: str) -> StoredFile | None:
        if not valid_job_id(file_id):
            return None
        return _stored(file_id, await self._redis.hgetall(file_key(file_id)))  # type: ignore[misc]

    async def listed(self, tenant: str) -> list[FileObject]:
        """A tenant's files, oldest first: at most `MAX_FILES`."""
        ids = [i.decode() for i in await self._redis.zrange(tenant_files(tenant), 0, -1)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for file_id in ids:
                pipe.hgetall(file_key(file_id))
            found = [_stored(i, raw) for i, raw in zip(ids, await pipe.execute(), strict=True)]
        return sorted((file.shown for file in found if file), key=lambda shown: shown.id)

    async def delete(self, file: StoredFile) -> None:
        keys = _keys(file.tenant, file.shown.id)
        await run_script(self._redis, "file_delete", keys, [file.shown.id])

    async def read(self, file_id: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The content from `offset` on: more than 0 only for uploads, whose pieces have one size."""
        key, at, count = file_data(file_id), offset // PIECE_BYTES, 1
        skip = offset % PIECE_BYTES
        while pieces := await self._redis.lrange(key, at, at + count - 1):  # type: ignore[misc]
            data = b"".join(pieces)
            yield data[skip:]
            at, skip = at + count, 0
            count = min(
                max(READ_BYTES * len(pieces) // max(len(data), 1), 1), MAX_PIECES
            )  # a batch writes line by line

    async def lines(self, file_id: str, offset: int = 0) -> AsyncIterator[tuple[bytes, int]]:
        """Lines without their ends, each with the offset behind it. Empty ones are left out."""
        rest, start = b"", offset
        async for data in self.read(file_id, offset):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                start += len(line) + 1
                if line.strip():
                    yield line, start
        if rest.strip():
            yield rest, start + len(rest)


def _keys(tenant: str, file_id: str) -> list[str]:
    return [file_key(file_id), file_data(file_id), tenant_files(tenant), tenant_bytes(tenant)]


def _stored(file_id: str, raw: Mapping[bytes, bytes]) -> StoredFile | None:
    if b"purpose" not in raw:
        return None
    values: dict[str, Any] = {name.decode(): value.decode(errors="replace") for name, value in raw.items()}
    shown = FileObject(
        id=file_id,
        bytes=int(values["bytes"]),
        created_at=int(values["created_at"]),
        expires_at=int(values["expires"]) // 1000,
        filename=values["filename"],
        purpose=values["purpose"],
    )
    return StoredFile(tenant=values["tenant"], shown=shown)
