"""/v1/responses: create (waiting, streaming, in the background), look up, resume, cancel, delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.params import Body, PathParameter, QueryParameter
from redis.exceptions import RedisError

from gateway.auth import own
from gateway.core import Gateway, GatewayHere
from gateway.disconnect import OnDisconnect, parse_on_disconnect
from gateway.errors import CLIENT_CLOSED_REQUEST, ERROR_RESPONSES, HttpError, describe, job_error, not_found
from gateway.metrics import Timing, open_stream
from gateway.responses.inputs import body_of, check_request, input_items, messages_of, parse_response
from gateway.responses.records import Record, Records
from gateway.responses.render import EventWriter
from gateway.responses.schema import Deleted, InputItems, ResponseBody, ResponseDTO, ResponseRequest
from gateway.store import JobRef, NewJob, new_id
from gateway.stream import STOPPING, ClientLeftError, EventStream, gathered, unless_client_leaves
from gateway.submitting import new_job
from headrace.errors import HeadraceError
from headrace.messages import End, Event

CANCEL_WAIT_S = 2.0
ResponseId = Annotated[str, PathParameter(description="The response's id.")]


@post(
    "/responses",
    dto=ResponseDTO,
    return_dto=None,
    status_code=200,
    tags=["OpenAI"],
    summary="Create a response",
    responses=ERROR_RESPONSES,
)
async def create_response(
    data: Annotated[ResponseRequest, Body(description="With `stream`, the answer is text/event-stream.")],
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
) -> Response[Any]:
    record, job = await _plan(gateway, request, data)
    timing = Timing(gateway.metrics, request.scope["path_template"])
    await _submit(gateway, record, job)
    default = "continue" if record.body.background else "cancel"
    policy = parse_on_disconnect(data.on_disconnect, default)
    if data.stream:
        return _stream(gateway, record, -1, policy, timing)
    if record.body.background:
        return Response(record.body, media_type="application/json")
    try:
        await unless_client_leaves(request.receive, _until_ended(gateway, job.ref, timing))
        return Response(await _answer(gateway, record), headers={"x-headrace-jobs": record.id})
    except ClientLeftError:
        gateway.client_left([job.ref], policy)
        return Response(None, status_code=CLIENT_CLOSED_REQUEST, media_type="application/json")
    except Exception:
        gateway.abandon([job.ref])
        raise


@get("/responses/{response_id:str}", tags=["OpenAI"], summary="A stored response", responses=ERROR_RESPONSES)
async def get_response(
    response_id: ResponseId,
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    stream: Annotated[bool, QueryParameter(description="Answer with its events.")] = False,
    starting_after: Annotated[
        int, QueryParameter(ge=-1, description="Only events with a greater `sequence_number`.")
    ] = -1,
) -> Response[Any]:
    """With `stream`, its events from any number on, also while it runs, at any gateway."""
    record = await _found(gateway, request, response_id)
    if not stream:
        return Response((await _refreshed(gateway, record)).body)
    return _stream(gateway, record, starting_after, OnDisconnect(None))


@get(
    "/responses/{response_id:str}/input_items",
    tags=["OpenAI"],
    summary="What a response was asked",
    responses=ERROR_RESPONSES,
)
async def get_input_items(
    response_id: ResponseId, request: Request[Any, Any, Any], gateway: GatewayHere
) -> InputItems:
    record = await _found(gateway, request, response_id)
    suffix = response_id.removeprefix("resp_")
    items = [
        {"id": f"item_{suffix}_{index}", "type": "message", **item} for index, item in enumerate(record.items)
    ]
    return InputItems(data=items[::-1], first_id=items[-1]["id"], last_id=items[0]["id"])


@post(
    "/responses/{response_id:str}/cancel",
    status_code=200,
    tags=["OpenAI"],
    summary="Cancel a background response",
    responses=ERROR_RESPONSES,
)
async def cancel_response(
    response_id: ResponseId, request: Request[Any, Any, Any], gateway: GatewayHere
) -> ResponseBody:
    """What was said until then stays. A response that has ended is left as it is."""
    record = await _refreshed(gateway, await _found(gateway, request, response_id))
    if not record.body.background:
        raise HeadraceError("invalid_request", "Only a background response can be cancelled.", "response_id")
    if record.settled:
        return record.body
    ref = JobRef(record.pool, record.id)
    await gateway.pulse.guard(gateway.store.cancel(ref))
    with suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_WAIT_S):
            await _until_ended(gateway, ref)
    return (await _refreshed(gateway, record)).body


@delete(
    "/responses/{response_id:str}",
    status_code=200,
    tags=["OpenAI"],
    summary="Forget a response",
    responses=ERROR_RESPONSES,
)
async def delete_response(
    response_id: ResponseId, request: Request[Any, Any, Any], gateway: GatewayHere
) -> Deleted:
    """One that still runs is cancelled."""
    record = await _refreshed(gateway, await _found(gateway, request, response_id))
    if not record.settled:
        await gateway.pulse.guard(gateway.store.cancel(JobRef(record.pool, record.id)))
    await gateway.pulse.guard(_records(gateway).delete(record.pool, record.id))
    return Deleted(id=response_id)


async def _plan(
    gateway: Gateway, request: Request[Any, Any, Any], data: ResponseRequest
) -> tuple[Record, NewJob]:
    """Raises HeadraceError naming the field, HttpError, RedisError."""
    check_request(data)
    items = input_items(data)
    context = [*await _before(gateway, request, data.previous_response_id), *messages_of(items)]
    system = [{"role": "system", "content": data.instructions}] if data.instructions else []
    prompt, params = parse_response(data, [*system, *context])
    if len(msgspec.json.encode(context)) > gateway.settings.max_body_bytes:
        raise HeadraceError("too_large", "The conversation is longer than this server keeps.", "input")
    pool = await gateway.route(data.model)
    response_id = new_id("resp_")
    job = new_job(request, data, JobRef(pool.name, response_id), prompt, params)
    body = body_of(data, params, response_id, data.model or pool.name)
    return Record(pool.name, job.tenant, body, items, context, settled=False), job


async def _before(
    gateway: Gateway, request: Request[Any, Any, Any], previous_id: str | None
) -> list[dict[str, str]]:
    if previous_id is None:
        return []
    try:
        previous = await _refreshed(gateway, await _found(gateway, request, previous_id))
    except HttpError:
        message = f"Previous response with id {previous_id[:128]!r} not found."
        raise HttpError(
            400, message, code="previous_response_not_found", param="previous_response_id"
        ) from None
    if previous.body.status not in ("completed", "incomplete") or not previous.body.output:
        message = f"It is {previous.body.status}; only an answered response can be gone on with."
        raise HeadraceError("invalid_request", message, "previous_response_id")
    return previous.following()


async def _submit(gateway: Gateway, record: Record, job: NewJob) -> None:
    """The record first: a job without one could not be looked up, a record without a job expires."""
    stored = record.body.store
    if stored:
        retention_ms = gateway.settings.response_retention_ms
        await gateway.pulse.guard(_records(gateway).put(record, retention_ms))
    try:
        await gateway.submit(job)
    except Exception:
        if stored:
            with suppress(RedisError, OSError):
                await gateway.pulse.guard(_records(gateway).delete(record.pool, record.id))
        raise


def _stream(
    gateway: Gateway, record: Record, after: int, policy: OnDisconnect, timing: Timing | None = None
) -> EventStream:
    writer, refs = EventWriter(record.body, after), [JobRef(record.pool, record.id)]

    def stopped() -> bytes:
        gateway.nobody_waits(refs, policy)
        return _told(writer, STOPPING)

    return EventStream(
        _chunks(gateway, record, writer, timing),
        heartbeat_s=gateway.settings.heartbeat_s,
        on_left=lambda: gateway.client_left(refs, policy),
        on_stop=stopped,
        headers={"x-headrace-jobs": record.id},
    )


def _told(writer: EventWriter, exc: Exception) -> bytes:
    error = describe(exc)[1].error
    return writer.error(error.code, error.message, error.param)


async def _chunks(
    gateway: Gateway, record: Record, writer: EventWriter, timing: Timing | None
) -> AsyncGenerator[bytes, None]:
    """Events from the log; of a log that is gone, the answer that was kept."""
    ref = JobRef(record.pool, record.id)
    with open_stream(gateway.metrics):
        try:
            if not await gateway.store.state(ref):
                for chunk in writer.terminal((await _records(gateway).refreshed(record)).body):
                    yield chunk
                return
            for chunk in writer.opening():
                yield chunk
            async with aclosing(gateway.store.follow(ref)) as batches:
                async for events in batches:
                    _note(events, timing)
                    for chunk in gathered(chunk for event in events for chunk in writer.event(event)):
                        yield chunk
            if (last := writer.overtaken) is not None:
                yield writer.error("invalid_request", f"The last event is {last}.", "starting_after")
            if record.body.store:
                with suppress(RedisError, OSError):  # the tasks process, or a look-up, keeps it too
                    await _records(gateway).refreshed(record)
        except Exception as exc:
            gateway.report(exc)
            yield _told(writer, exc)


async def _until_ended(gateway: Gateway, ref: JobRef, timing: Timing | None = None) -> None:
    async with aclosing(gateway.store.follow(ref)) as batches:
        async for events in batches:
            _note(events, timing)


def _note(events: Sequence[Event], timing: Timing | None) -> None:
    if timing is None:
        return
    timing.heard(events)
    if isinstance(events[-1], End):
        timing.ended()


async def _answer(gateway: Gateway, record: Record) -> ResponseBody:
    """Raises what the job ended with, so that a refusal has its own status."""
    body = (await _records(gateway).refreshed(record)).body
    if body.status == "cancelled":
        raise job_error(None, "cancelled")
    if body.error is not None:
        raise job_error({"code": body.error.code, "message": body.error.message}, "failed")
    return body


async def _found(gateway: Gateway, request: Request[Any, Any, Any], response_id: str) -> Record:
    pools = list(await gateway.pulse.guard(gateway.directory.pools()))
    record = await gateway.pulse.guard(_records(gateway).find(response_id, pools))
    return own(
        request, record, not_found(f"Response with id {response_id[:128]!r} not found.", "response_id")
    )


async def _refreshed(gateway: Gateway, record: Record) -> Record:
    return await gateway.pulse.guard(_records(gateway).refreshed(record))


def _records(gateway: Gateway) -> Records:
    return Records(gateway.store.redis)


ROUTES = [
    create_response,
    get_response,
    get_input_items,
    cancel_response,
    delete_response,
]
