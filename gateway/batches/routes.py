"""/v1/batches: create, list, look up, cancel. The work is done by `python -m gateway.tasks`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from litestar import Request, get, post
from litestar.params import Body, PathParameter, QueryParameter

from gateway.auth import own, tenant_of
from gateway.batches.lines import ENDPOINTS
from gateway.batches.schema import Batch, BatchDTO, BatchList, BatchRequest
from gateway.batches.store import Batches, Stored
from gateway.core import Gateway, GatewayHere
from gateway.errors import ERROR_RESPONSES, HttpError, not_found
from gateway.files import find_file, paged
from gateway.responses.inputs import check_metadata
from gateway.store import new_id
from headrace.errors import HeadraceError

WINDOW = "24h"
WINDOW_MS = 86_400_000
CANCELLABLE = ("validating", "in_progress")
BatchId = Annotated[str, PathParameter(description="The batch's id.")]


@post(
    "/batches",
    dto=BatchDTO,
    return_dto=None,
    status_code=200,
    tags=["OpenAI"],
    summary="Run the requests of a file",
    responses=ERROR_RESPONSES,
)
async def create_batch(
    data: Annotated[BatchRequest, Body(description="What to run; the answers come as files.")],
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
) -> Batch:
    if data.endpoint not in ENDPOINTS:
        raise HeadraceError("invalid_request", f"One of {', '.join(ENDPOINTS)} is needed.", "endpoint")
    if data.completion_window != WINDOW:
        raise HeadraceError("invalid_request", f"Only {WINDOW} is supported.", "completion_window")
    check_metadata(data.metadata or {})
    file = await find_file(gateway, request, data.input_file_id)
    if file.shown.purpose != "batch":
        message = "A file uploaded with the purpose batch is needed."
        raise HeadraceError("invalid_request", message, "input_file_id")
    return await _put(gateway, tenant_of(request, None), data)


@get("/batches", tags=["OpenAI"], summary="Batches, newest first", responses=ERROR_RESPONSES)
async def list_batches(
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    after: Annotated[str | None, QueryParameter(description="The last id of the page before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=100, description="At most so many.")] = 20,
) -> BatchList:
    found = await gateway.pulse.guard(Batches(gateway.store.redis).listed(tenant_of(request, None)))
    page, more = paged([batch.shown() for batch in found], after, limit)
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return BatchList(data=page, first_id=ends[0], last_id=ends[1], has_more=more)


@get("/batches/{batch_id:str}", tags=["OpenAI"], summary="A batch", responses=ERROR_RESPONSES)
async def get_batch(batch_id: BatchId, request: Request[Any, Any, Any], gateway: GatewayHere) -> Batch:
    return (await _found(gateway, request, batch_id)).shown()


@post(
    "/batches/{batch_id:str}/cancel",
    status_code=200,
    tags=["OpenAI"],
    summary="Cancel a batch",
    responses=ERROR_RESPONSES,
)
async def cancel_batch(batch_id: BatchId, request: Request[Any, Any, Any], gateway: GatewayHere) -> Batch:
    """What has been answered stays in the output file. A batch that has ended is left as it is."""
    batches = Batches(gateway.store.redis)
    batch = await _found(gateway, request, batch_id)
    while batch.status in CANCELLABLE and not await gateway.pulse.guard(batches.move(batch, "cancelling")):
        batch = await _found(gateway, request, batch_id)
    return (await _found(gateway, request, batch_id)).shown()


async def _put(gateway: Gateway, tenant: str, data: BatchRequest) -> Batch:
    batches, batch_id, ttl_ms = (
        Batches(gateway.store.redis),
        new_id("batch_"),
        gateway.settings.file_retention_ms,
    )
    fields: dict[str, Any] = {
        "tenant": tenant,
        "status": "validating",
        "endpoint": data.endpoint,
        "input": data.input_file_id,
        "window": data.completion_window,
        "created": int(time.time() * 1000),
        "output": new_id("file-"),
        "error": new_id("file-"),
        "ttl": ttl_ms,
    }
    if data.metadata is not None:
        fields["metadata"] = msgspec.json.encode(data.metadata)
    window_ms = min(WINDOW_MS, ttl_ms // 2)  # results are to be kept for a while
    await gateway.pulse.guard(batches.put(batch_id, tenant, fields, ttl_ms=ttl_ms, window_ms=window_ms))
    found = await gateway.pulse.guard(batches.find(batch_id))
    if found is None:
        raise HttpError(503, "The batch could not be stored.", code="unavailable")
    return found.shown()


async def _found(gateway: Gateway, request: Request[Any, Any, Any], batch_id: str) -> Stored:
    found = await gateway.pulse.guard(Batches(gateway.store.redis).find(batch_id))
    return own(request, found, not_found(f"No batch found with id {batch_id[:128]!r}.", "id"))


ROUTES = [create_batch, list_batches, get_batch, cancel_batch]
