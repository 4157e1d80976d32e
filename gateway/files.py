"""/v1/files: upload, list, look up, read, delete. What batches read and write."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, Response, Router, delete, get, post
from litestar.datastructures import UploadFile
from litestar.params import PathParameter, QueryParameter
from litestar.response import Stream

from gateway.auth import own, tenant_of
from gateway.core import Gateway, GatewayHere
from gateway.errors import ERROR_RESPONSES, not_found
from gateway.filestore import PIECE_BYTES, FileObject, Files, StoredFile
from headrace.config import GatewaySettings
from headrace.errors import HeadraceError

PURPOSES = ("batch", "user_data")
FORM_BYTES = 65_536  # what a form has around its file
MIN_TTL_S, MAX_TTL_S = 60, 2_592_000
FileId = Annotated[str, PathParameter(description="The file's id.")]


class FileList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


@post(
    "/files",
    status_code=200,
    tags=["OpenAI"],
    summary="Upload a file (multipart/form-data: file, purpose)",
    responses=ERROR_RESPONSES,
)
async def create_file(request: Request[Any, Any, Any], gateway: GatewayHere) -> FileObject:
    form = await request.form()
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise HeadraceError("invalid_request", "A form with a file is needed.", "file")
    if purpose not in PURPOSES:
        raise HeadraceError("invalid_request", f"One of {', '.join(PURPOSES)} is needed.", "purpose")
    ttl_ms = _ttl_ms(form.get("expires_after[seconds]"), gateway.settings.file_retention_ms)
    files, settings = Files(gateway.store.redis), gateway.settings
    file_id, size = await files.upload(_pieces(file), settings.max_file_bytes)
    shown = FileObject(
        id=file_id, bytes=size, created_at=int(time.time()), filename=file.filename or "file", purpose=purpose
    )
    stored = await files.commit(
        tenant_of(request, None), shown, ttl_ms=ttl_ms, max_tenant_bytes=settings.max_tenant_bytes
    )
    return stored.shown


@get("/files", tags=["OpenAI"], summary="Files", responses=ERROR_RESPONSES)
async def list_files(
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    purpose: Annotated[str | None, QueryParameter(description="Only those of this purpose.")] = None,
    after: Annotated[str | None, QueryParameter(description="The last id of the page before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=10_000, description="At most so many.")] = 1000,
    order: Annotated[Literal["asc", "desc"], QueryParameter(description="By time of creation.")] = "desc",
) -> FileList:
    found = await gateway.pulse.guard(Files(gateway.store.redis).listed(tenant_of(request, None)))
    found = [file for file in found if purpose in (None, file.purpose)]
    page, more = paged(found if order == "asc" else found[::-1], after, limit)
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return FileList(data=page, first_id=ends[0], last_id=ends[1], has_more=more)


@get("/files/{file_id:str}", tags=["OpenAI"], summary="A file's description", responses=ERROR_RESPONSES)
async def get_file(file_id: FileId, request: Request[Any, Any, Any], gateway: GatewayHere) -> FileObject:
    return (await find_file(gateway, request, file_id)).shown


@get("/files/{file_id:str}/content", tags=["OpenAI"], summary="A file's content", responses=ERROR_RESPONSES)
async def get_content(
    file_id: FileId, request: Request[Any, Any, Any], gateway: GatewayHere
) -> Response[Any]:
    file = (await find_file(gateway, request, file_id)).shown
    headers = {"content-length": str(file.bytes)}
    content = _content(Files(gateway.store.redis), file.id)
    return Stream(content, media_type="application/octet-stream", headers=headers)


@delete(
    "/files/{file_id:str}",
    status_code=200,
    tags=["OpenAI"],
    summary="Delete a file",
    responses=ERROR_RESPONSES,
)
async def delete_file(file_id: FileId, request: Request[Any, Any, Any], gateway: GatewayHere) -> FileDeleted:
    await Files(gateway.store.redis).delete(await find_file(gateway, request, file_id))
    return FileDeleted(id=file_id)


def router(settings: GatewaySettings) -> Router:
    """Apart from the other routes, for its bodies are larger."""
    handlers = [create_file, list_files, get_file, get_content, delete_file]
    return Router("/", route_handlers=handlers, request_max_body_size=settings.max_file_bytes + FORM_BYTES)


async def find_file(gateway: Gateway, request: Request[Any, Any, Any], file_id: str) -> StoredFile:
    found = await gateway.pulse.guard(Files(gateway.store.redis).find(file_id))
    return own(request, found, not_found(f"No such File object: {file_id[:128]}", "id"))


def paged(items: list[Any], after: str | None, limit: int) -> tuple[list[Any], bool]:
    """What follows the item `after`; an id that is not there begins at the start."""
    ids = [item.id for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    return items[start : start + limit], len(items) > start + limit


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while piece := await file.read(PIECE_BYTES):
        yield piece


async def _content(files: Files, file_id: str) -> AsyncGenerator[bytes, None]:
    async for data in files.read(file_id):
        yield data


def _ttl_ms(seconds: Any, longest_ms: int) -> int:
    if seconds is None:
        return longest_ms
    if not str(seconds).isdigit() or not MIN_TTL_S <= int(seconds) <= MAX_TTL_S:
        message = f"A number from {MIN_TTL_S} to {MAX_TTL_S} is needed."
        raise HeadraceError("invalid_request", message, "expires_after[seconds]")
    return min(int(seconds) * 1000, longest_ms)
