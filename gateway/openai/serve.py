"""What both OpenAI endpoints do with a planned request: submit, then stream or wait for the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response

from gateway.core import Gateway
from gateway.disconnect import OnDisconnect
from gateway.errors import CLIENT_CLOSED_REQUEST, describe, job_error
from gateway.merge import merged
from gateway.metrics import Timing, open_stream
from gateway.openai.schema import PromptTokensDetails, UsageBody
from gateway.store import JobRef, NewJob
from gateway.stream import DONE, STOPPING, ClientLeftError, EventStream, gathered, sse, unless_client_leaves
from headrace.messages import Delta, End, Event, Finish, Result, Usage


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in every chunk of an answer."""

    id: str
    created_s: int
    model: str
    fingerprint: str | None
    num_choices: int  # for each prompt
    include_usage: bool = False
    echo: tuple[str, ...] | None = None  # the prompts, which come before each choice's text


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request, one job for each prompt, nothing submitted yet."""

    head: Head
    jobs: list[NewJob]
    on_disconnect: OnDisconnect
    stream: bool


class Writer(ABC):
    """Turns events and results into one endpoint's shapes. Holds what a stream must remember."""

    @abstractmethod
    def delta(self, prompt_index: int, event: Delta) -> bytes:
        """Its chunks; empty when it says nothing."""

    @abstractmethod
    def finish(self, prompt_index: int, event: Finish) -> bytes: ...

    @abstractmethod
    def usage(self, usage: UsageBody) -> bytes:
        """The chunk with empty `choices` that ends a stream whose client asked for usage."""

    @abstractmethod
    def whole(self, results: list[Result], usage: UsageBody) -> msgspec.Struct: ...


async def answer(
    gateway: Gateway, request: Request[Any, Any, Any], plan: Plan, writer: Writer
) -> Response[Any]:
    """Submits before anything is sent, so that a refusal still has its own status. Raises HeadraceError."""
    timing = Timing(gateway.metrics, request.scope["path_template"])
    refs = await gateway.submit_all(plan.jobs)
    headers = {"x-headrace-jobs": ",".join(ref.id for ref in refs)}
    if not plan.stream:
        return await _wait(gateway, request, plan, refs, writer, timing, headers)
    return EventStream(
        _chunks(gateway, plan, refs, writer, timing),
        heartbeat_s=gateway.settings.heartbeat_s,
        on_left=lambda: gateway.client_left(refs, plan.on_disconnect),
        on_stop=lambda: _stopped(gateway, plan, refs),
        headers=headers,
    )


def _stopped(gateway: Gateway, plan: Plan, refs: Sequence[JobRef]) -> bytes:
    """Nobody can go on with this answer."""
    gateway.nobody_waits(refs, plan.on_disconnect)
    return sse(msgspec.json.encode(describe(STOPPING)[1]))


async def _chunks(
    gateway: Gateway, plan: Plan, refs: Sequence[JobRef], writer: Writer, timing: Timing
) -> AsyncGenerator[bytes, None]:
    """The stream's chunks. A failure is told by an error event; nothing follows it, not even [DONE]."""
    usages: list[Usage] = []
    with open_stream(gateway.metrics):
        try:
            async with aclosing(merged([gateway.store.follow(ref) for ref in refs])) as batches:
                async for index, events in batches:
                    timing.heard(events)
                    for chunk in gathered(_written(writer, index, events)):
                        yield chunk
                    _note_end(events[-1], usages)
        except Exception as exc:
            gateway.abandon(refs)
            gateway.report(exc)
            yield sse(msgspec.json.encode(describe(exc)[1]))
            return
        timing.ended()
        if plan.head.include_usage:
            yield writer.usage(total(usages))
        yield DONE


def _written(writer: Writer, index: int, events: Iterable[Event]) -> Iterator[bytes]:
    for event in events:
        if isinstance(event, Delta):
            yield writer.delta(index, event)
        elif isinstance(event, Finish):
            yield writer.finish(index, event)


async def _wait(
    gateway: Gateway,
    request: Request[Any, Any, Any],
    plan: Plan,
    refs: Sequence[JobRef],
    writer: Writer,
    timing: Timing,
    headers: dict[str, str],
) -> Response[Any]:
    try:
        usages = await unless_client_leaves(request.receive, _until_ended(gateway, refs, timing))
        results = [await gateway.store.result(ref) for ref in refs]
    except ClientLeftError:
        gateway.client_left(refs, plan.on_disconnect)
        return Response(None, status_code=CLIENT_CLOSED_REQUEST, media_type="application/json")
    except Exception:
        gateway.abandon(refs)
        raise
    timing.ended()
    return Response(writer.whole(results, total(usages)), headers=headers, media_type="application/json")


async def _until_ended(gateway: Gateway, refs: Sequence[JobRef], timing: Timing) -> list[Usage]:
    usages: list[Usage] = []
    async with aclosing(merged([gateway.store.follow(ref) for ref in refs])) as batches:
        async for _, events in batches:
            timing.heard(events)
            _note_end(events[-1], usages)
    return usages


def _note_end(event: Event, usages: list[Usage]) -> None:
    if not isinstance(event, End):
        return
    if event.status != "done":
        raise job_error(event.error, event.status)
    if event.usage is not None:
        usages.append(event.usage)


def total(usages: Sequence[Usage]) -> UsageBody:
    return UsageBody(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        total_tokens=sum(usage.total_tokens for usage in usages),
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(usage.cached_tokens for usage in usages)),
    )
