"""/v1/jobs: the queue's own interface over HTTP: submit, poll, follow (and resume), cancel."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.params import Body, HeaderParameter, PathParameter, QueryParameter
from redis.exceptions import RedisError

from gateway.auth import own
from gateway.core import Gateway, GatewayHere
from gateway.disconnect import OnDisconnect, parse_on_disconnect
from gateway.errors import CLIENT_CLOSED_REQUEST, ERROR_RESPONSES, describe, not_found
from gateway.jobschema import JobDTO, JobRequest, JobState, job_state
from gateway.metrics import open_stream
from gateway.store import Found, JobRef
from gateway.stream import STOPPING, ClientLeftError, EventStream, gathered, sse, unless_client_leaves
from gateway.submitting import plan_job
from headrace.errors import HeadraceError
from headrace.keys import valid_job_id, valid_pool
from headrace.messages import ENDED, Event

MAX_WAIT_S = 60.0
JobId = Annotated[str, PathParameter(description="The job's id.")]
PoolName = Annotated[str | None, QueryParameter(description="Look in this pool only.")]


@post(
    "/jobs",
    dto=JobDTO,
    return_dto=None,
    status_code=202,
    tags=["Jobs"],
    summary="Submit a job",
    responses=ERROR_RESPONSES,
)
async def create_job(
    data: Annotated[JobRequest, Body(description="The fields of a queue entry, as JSON.")],
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    idempotency_key: Annotated[str | None, HeaderParameter(name="Idempotency-Key")] = None,
) -> Response[JobState]:
    """The same key and body give the same job; the same key with another body is a 409."""
    body_hash = hashlib.sha256(await request.body()).hexdigest()
    job = await plan_job(gateway, request, data, idempotency_key, body_hash)
    ref = await gateway.submit(job)
    fields: dict[str, str] = {}
    with suppress(RedisError, OSError):  # it is submitted, whatever happens to the question of its state
        fields = await gateway.pulse.guard(gateway.store.state(ref))
    return Response(job_state(ref, fields), status_code=202, headers={"Location": f"/v1/jobs/{ref.id}"})


@get("/jobs/{job_id:str}", tags=["Jobs"], summary="A job's state", responses=ERROR_RESPONSES)
async def get_job(
    job_id: JobId,
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    pool: PoolName = None,
    wait: Annotated[
        float, QueryParameter(ge=0, le=MAX_WAIT_S, description="Wait so long for its end, s.")
    ] = 0.0,
) -> Response[JobState]:
    found = await find_job(gateway, request, job_id, pool)
    if wait > 0 and found.fields["status"] not in ENDED:
        try:
            await unless_client_leaves(request.receive, _until_ended(gateway, found, wait))
        except ClientLeftError:
            return Response(job_state(found.ref, found.fields), status_code=CLIENT_CLOSED_REQUEST)
        found = await find_job(gateway, request, job_id, found.ref.pool)
    state = job_state(found.ref, found.fields)
    if state.status == "queued":
        await gateway.waiting.describe(found, state)
    return Response(state)


@delete(
    "/jobs/{job_id:str}", status_code=200, tags=["Jobs"], summary="Cancel a job", responses=ERROR_RESPONSES
)
async def cancel_job(
    job_id: JobId, request: Request[Any, Any, Any], gateway: GatewayHere, pool: PoolName = None
) -> Response[JobState]:
    """202 while the job still has to stop; 200 when it has ended, by this call or before it."""
    found = await find_job(gateway, request, job_id, pool)
    if found.fields["status"] not in ENDED:
        await gateway.store.cancel(found.ref)
        found = await find_job(gateway, request, job_id, found.ref.pool)
    state = job_state(found.ref, found.fields)
    return Response(state, status_code=200 if state.status in ENDED else 202)


@get(
    "/jobs/{job_id:str}/events",
    media_type="text/event-stream",
    tags=["Jobs"],
    summary="A job's events as they happen",
    responses=ERROR_RESPONSES,
)
async def get_events(
    job_id: JobId,
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    pool: PoolName = None,
    after: Annotated[str | None, QueryParameter(description="Only events with a greater `seq`.")] = None,
    last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID")] = None,
) -> Response[Any]:
    """Each event's SSE `id` is its `seq`. A reader that reconnects after the last event is told 204: stop."""
    last_event_id = last_event_id or None  # some readers send it empty before their first event
    after_seq = (
        _seq(last_event_id, "Last-Event-ID") if last_event_id is not None else _seq(after or "0", "after")
    )
    found = await find_job(gateway, request, job_id, pool)
    last_seq = int(found.fields.get("seq") or 0)
    if after_seq > last_seq:
        message = f"The job's last event is {last_seq}; {after_seq} is not known."
        raise HeadraceError("invalid_request", message, "after" if last_event_id is None else "Last-Event-ID")
    if last_event_id is not None and after_seq == last_seq and found.fields["status"] in ENDED:
        return Response(None, status_code=204)
    policy = parse_on_disconnect(await gateway.store.entry_field(found, "on_disconnect"), "continue")
    return _event_stream(gateway, found.ref, after_seq, policy)


def _event_stream(gateway: GatewayHere, ref: JobRef, after_seq: int, policy: OnDisconnect) -> EventStream:
    return EventStream(
        _chunks(gateway, ref, after_seq),
        heartbeat_s=gateway.settings.heartbeat_s,
        on_left=lambda: gateway.client_left([ref], policy),
        on_stop=lambda: sse(msgspec.json.encode(describe(STOPPING)[1]), event="error"),
    )


async def _chunks(gateway: Gateway, ref: JobRef, after_seq: int) -> AsyncGenerator[bytes, None]:
    with open_stream(gateway.metrics):
        try:
            async with aclosing(gateway.store.follow(ref, after_seq)) as batches:
                async for events in batches:
                    for chunk in gathered(map(_sse, events)):
                        yield chunk
        except Exception as exc:
            gateway.report(exc)
            yield sse(msgspec.json.encode(describe(exc)[1]), event="error")


def _sse(event: Event) -> bytes:
    return sse(msgspec.json.encode(event), event=str(event.__struct_config__.tag), event_id=event.seq)


async def _until_ended(gateway: Gateway, found: Found, wait_s: float) -> None:
    try:
        async with (
            asyncio.timeout(wait_s),
            aclosing(gateway.store.follow(found.ref, int(found.fields.get("seq") or 0))) as batches,
        ):
            async for _ in batches:
                pass
    except TimeoutError:
        return


async def find_job(gateway: Gateway, request: Request[Any, Any, Any], job_id: str, pool: str | None) -> Found:
    if not valid_job_id(job_id) or (pool is not None and not valid_pool(pool)):
        field = "pool" if valid_job_id(job_id) else "job_id"
        limits = "1 to 64 of A-Z a-z 0-9 . _ -" if field == "pool" else "1 to 128 of A-Z a-z 0-9 . _ : -"
        raise HeadraceError("invalid_request", f"{field} must be {limits}.", field)
    found = await gateway.pulse.guard(gateway.store.find(job_id, pool))
    return own(request, found, not_found("No job has this id, or its time of keeping is over."))


def _seq(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise HeadraceError("invalid_request", "Expected the number of an event.", name)
    return int(text)
